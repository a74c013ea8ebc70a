"""Spaces of hyperparameters: those of the search, and CBN's in a model of one's own.

With KerasTuner and any model that has CBN layers, one line tunes them:

    def build(hp):
        model = ...
        spaces.cbn(hp, model)
        model.compile(...)
        return model

    tuner = keras_tuner.BayesianOptimization(build, "val_accuracy", max_trials=20)
    tuner.search(x, y, validation_data=..., epochs=10, callbacks=[keras_norms.AMAT()])
"""

import dataclasses
import math

import keras

from keras_norms import CBN
from keras_norms._checks import arguments
from keras_norms.layers import layers_of


def cbn(hp, model, rho=(0.125, 8.0), omega=(0.0, 100.0), per="network"):
    """Puts rho and omega of every CBN layer of a model under hyperparameters.

    Those of nested layers and of `FusedCBN` too. The hyperparameters are called "rho"
    and "omega", or where there is one for each group, "rho_<group>".

    Args:
        hp: A `keras_tuner.HyperParameters`.
        model: A `keras.Model`, before it trains.
        rho: Two positive floats, bounds on a logarithmic scale. `None` leaves rho as it
            is.
        omega: Two floats >= 0, the bounds of omega. `None` leaves it as it is.
        per: Which layers share a rho: `"network"`, all; `"layer"`, none; or a function
            from a layer to the name of its group. There is one omega.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no CBN layer, if bounds are not such, or `per` is
            something else.
    """
    _check_hp(hp)
    if not isinstance(model, keras.Model):
        raise arguments.wrong("model", "a keras.Model", model)
    layers = layers_of(model, CBN)
    if not layers:
        raise ValueError(
            "Argument `model` must have CBN layers. "
            f"Received: {model.name!r}, which has none"
        )
    for name, bounds in (("rho", rho), ("omega", omega)):
        if bounds is not None:
            if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
                raise arguments.wrong(name, "two numbers, or None", bounds)
            _check_bounds(name, *bounds, positive=name == "rho")
    group_of = {"network": lambda layer: None, "layer": lambda layer: layer.name}
    if not callable(per) and not (isinstance(per, str) and per in group_of):
        raise arguments.wrong("per", "'network', 'layer' or a function of a layer", per)
    group_of = per if callable(per) else group_of[per]
    for layer in layers:
        if rho is not None:
            group = group_of(layer)
            name = "rho" if group is None else f"rho_{group}"
            default = min(max(1.0, rho[0]), rho[1])
            value = hp.Float(name, *rho, sampling="log", default=default)
            layer.initial_rho = float(value)
            if layer.built:
                layer.rho.assign(layer.initial_rho)
        if omega is not None:
            default = min(max(10.0, omega[0]), omega[1])
            layer.omega = float(hp.Float("omega", *omega, default=default))
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)  # omega is a constant in it
    return model


def _check_hp(hp):
    if isinstance(hp, type) or not hasattr(hp, "Float") or not hasattr(hp, "Choice"):
        raise arguments.wrong("hp", "a keras_tuner.HyperParameters", hp)


def _check_text(name, value):
    if not isinstance(value, str):
        raise arguments.wrong(name, "a text", value)


def _check_bounds(name, low, high, positive):
    """Raises a ValueError unless there is a number between two bounds."""
    least, most = arguments.real(low), arguments.real(high)
    if not ((least > 0 if positive else least >= 0) and least < most < math.inf):
        raise ValueError(
            f"Bounds of `{name}` must be {'positive' if positive else '>= 0'}, finite, "
            "and the first one less than the second. "
            f"Received: {name}={arguments.shown(low)}..{arguments.shown(high)}"
        )


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of one setting of `recipes.train`."""

    name: str
    low: float
    high: float
    default: float
    grid: tuple  # values for a grid
    log: bool = False  # sampled on a logarithmic scale

    def __post_init__(self):
        _check_text("name", self.name)
        arguments.boolean("log", self.log)
        arguments.number("low", self.low, **{"above" if self.log else "at_least": 0})
        arguments.number("high", self.high, above=self.low)
        limits = {"at_least": self.low, "at_most": self.high}
        arguments.number("default", self.default, **limits)
        if not isinstance(self.grid, (tuple, list)) or not self.grid:
            raise arguments.wrong("grid", "a tuple of numbers", self.grid)
        for value in self.grid:
            arguments.number("grid", value, **limits)

    def add(self, hp, name, grid):
        """Adds it to a `keras_tuner.HyperParameters`, under a name."""
        _check_hp(hp)
        _check_text("name", name)
        arguments.boolean("grid", grid)
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
    _check_text("tune", tune)
    parts = [part for part in tune.replace(" ", "").split(",") if part]
    names = [part.partition("=")[0] for part in parts]
    if not parts:
        raise ValueError(
            "Argument `tune` must name a hyperparameter, the space is empty. Known: "
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
    _check_bounds(name, low, high, positive=usual.log)
    if name == "momentum" and high >= 1:
        raise ValueError(f"Bounds of `momentum` must be less than 1. Received: {part}")
    inside = {value for value in usual.grid if low <= value <= high}
    grid = tuple(sorted(inside | {low, high}))
    default = min(grid, key=lambda value: abs(value - usual.default))
    return dataclasses.replace(usual, low=low, high=high, default=default, grid=grid)
