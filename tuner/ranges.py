"""What the search tunes: settings of `recipes.train`, each with the values to try."""

import dataclasses

from tuner.spaces import check_bounds


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of one setting of `recipes.train`."""

    name: str
    low: float
    high: float
    default: float
    grid: tuple  # values for a grid
    log: bool = False  # sampled on a logarithmic scale

    def add(self, hp, name, grid):
        """Adds it to a `keras_tuner.HyperParameters`, under a name."""
        if grid:
            hp.Choice(name, list(self.grid), ordered=True, default=self.default)
        else:
            sampling = "log" if self.log else "linear"
            hp.Float(name, self.low, self.high, sampling=sampling, default=self.default)


POWERS = tuple(2.0**power for power in range(-3, 4))
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DECAYS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2)
RANGES = {
    "rho": Range("rho", 1 / 8, 8.0, 1.0, POWERS, log=True),
    "omega": Range("omega", 0.0, 100.0, 10.0, (0.0, 1.0, 3.0, 10.0, 30.0, 100.0)),
    "learning_rate": Range("learning_rate", 1e-3, 1.0, 0.1, RATES, log=True),
    "weight_decay": Range("weight_decay", 1e-5, 1e-2, 5e-4, DECAYS, log=True),
    "momentum": Range("momentum", 0.0, 0.99, 0.9, (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)),
}


def parse(tune):
    """The list of the `Range` that a text such as `"rho,omega=0..30"` names.

    Raises:
        ValueError: If there is none, if one is unknown or twice, or has no value.
    """
    parts = [part for part in tune.replace(" ", "").split(",") if part]
    names = [part.partition("=")[0] for part in parts]
    if not parts:
        raise ValueError(
            "Argument `tune` must name at least one hyperparameter of "
            f"{', '.join(RANGES)}. Received: tune={tune!r}"
        )
    if unknown := [name for name in names if name not in RANGES]:
        raise ValueError(
            f"Argument `tune` must have names of {', '.join(RANGES)}. "
            f"Received: tune={tune!r}, where {', '.join(unknown)} is unknown"
        )
    if len(set(names)) < len(names):
        raise ValueError(
            f"Argument `tune` must name each hyperparameter once. Received: {tune!r}"
        )
    return [_range(part) for part in parts]


def _range(part):
    name, _, bounds = part.partition("=")
    usual = RANGES[name]
    if not bounds:
        return usual
    try:
        low, high = map(float, bounds.split(".."))
    except ValueError as error:
        raise ValueError(
            "Argument `tune` must have bounds like rho=0.5..2. "
            f"Received: tune with {part!r}"
        ) from error
    check_bounds(name, (low, high), positive=usual.log)
    if name == "momentum" and high >= 1:
        raise ValueError(f"Bounds of `momentum` must be less than 1. Received: {part}")
    inside = {value for value in usual.grid if low <= value <= high}
    grid = tuple(sorted(inside | {low, high}))
    default = min(grid, key=lambda value: abs(value - usual.default))
    return dataclasses.replace(usual, low=low, high=high, default=default, grid=grid)
