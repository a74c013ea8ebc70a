"""The arguments of `tuner.spaces`."""

from tests.support.arguments.kinds import (
    FUNCTION,
    INF,
    NEVER,
    SWITCH,
    TEXT,
    Argument,
    is_pair,
    number,
)
from tests.support.arguments.values import DENSE, MODEL, PLAIN, Entry
from tuner import spaces


class HyperParameters:
    """What `tuner.spaces` needs of those of KerasTuner."""

    def Float(self, name, *bounds, default, **kwargs):
        return default

    Choice = Float


SPACES = {
    "spaces.cbn": Entry(
        spaces.cbn,
        {"hp": HyperParameters(), "model": MODEL},
        {
            "hp": NEVER.refuses(HyperParameters),
            "model": NEVER.refuses(DENSE, PLAIN),
            "rho": Argument(is_pair).or_none().refuses((0, 1), (2, 1), "12"),
            "omega": Argument(is_pair).or_none().refuses((-1, 1), (2, 2), (1, INF)),
            "per": FUNCTION.refuses("stage"),
        },
    ),
    "spaces.parse": Entry(
        spaces.parse, {}, {"tune": NEVER.refuses("rho,rho", "rho=1", "rho=a..b")}
    ),
    "spaces.Range": Entry(
        spaces.Range,
        {"name": "rho", "low": 0.5, "high": 4.0, "default": 2.0, "grid": (1.5, 4.0)},
        {
            "name": TEXT,
            "low": number(least=0),
            "high": number(above=0.5),
            "default": number(least=0.5, most=4),
            "grid": Argument(
                lambda v: is_pair(v) or (type(v) is list and v == [1.0])
            ).refuses((0.2, 2)),
            "log": SWITCH,
        },
    ),
    "spaces.Range.add": Entry(
        spaces.RANGES["rho"].add,
        {"hp": HyperParameters(), "name": "rho", "grid": True},
        {"hp": NEVER.refuses(HyperParameters), "name": TEXT, "grid": SWITCH},
        is_quick=True,
    ),
}
