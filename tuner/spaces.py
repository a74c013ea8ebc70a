"""CBN's hyperparameters in your own model.

With KerasTuner and any model that has CBN layers, one line tunes them:

    def build(hp):
        model = ...
        spaces.cbn(hp, model)
        model.compile(...)
        return model

    tuner = keras_tuner.BayesianOptimization(build, "val_accuracy", max_trials=20)
    tuner.search(x, y, validation_data=..., epochs=10, callbacks=[keras_norms.AMAT()])
"""

import re
import sys
from numbers import Real

import keras
import keras_tuner

from keras_norms import CBN
from keras_norms.layers import layers_of


def cbn(hp, model, rho=(0.125, 8.0), omega=(0.0, 100.0), per="network"):
    """Sets rho and omega of every CBN layer of a model from hyperparameters.

    Of nested layers and of `FusedCBN` too. The hyperparameters are called "rho" and
    "omega", or with one for each group, "rho_<group>".

    Args:
        hp: A `keras_tuner.HyperParameters`.
        model: A `keras.Model`, before it trains.
        rho: Two positive floats, bounds on a logarithmic scale. `None` leaves rho as it
            is.
        omega: Two floats >= 0, the bounds of omega. `None` leaves it as it is.
        per: Which layers share a rho: `"network"`, all; `"layer"`, none (the second
            layer of one name has "rho_<name>_2"; names that Keras or `convert` made
            lose their number, which differs from build to build); or a function from a
            layer to the name of its group. There is one omega.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no CBN layer, or if bounds or `per` are not as
            above.
    """
    if not isinstance(hp, keras_tuner.HyperParameters):
        raise _wrong("hp", "a keras_tuner.HyperParameters", hp)
    if not isinstance(model, keras.Model):
        raise _wrong("model", "a keras.Model", model)
    layers = layers_of(model, CBN)
    if not layers:
        raise _wrong("model", "a model with CBN layers", model)
    if rho is not None:
        check_bounds("rho", rho, positive=True)
    if omega is not None:
        check_bounds("omega", omega, positive=False)
    group_of = {"network": lambda layer: None, "layer": _unique_names(model)}
    if not callable(per) and not (isinstance(per, str) and per in group_of):
        raise _wrong("per", "'network', 'layer' or a function of a layer", per)
    group_of = per if callable(per) else group_of[per]
    for layer in layers:
        if rho is not None:
            group = group_of(layer)
            name = "rho" if group is None else f"rho_{group}"
            default = min(max(1.0, rho[0]), rho[1])
            value = hp.Float(name, *rho, sampling="log", default=default)
            layer.rho = float(value)
        if omega is not None:
            default = min(max(10.0, omega[0]), omega[1])
            layer.omega = float(hp.Float("omega", *omega, default=default))
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)  # omega is a constant in it
    return model


def _unique_names(model):
    """A function from each CBN layer to a name that is the same in every build."""
    plain, taken = {}, set()
    for layer in layers_of(model):
        name = re.sub(r"_\d+$", "", layer.name)
        is_automatic = name.replace("_", "") == type(layer).__name__.lower()
        plain[layer.name] = name if is_automatic else layer.name

    def unique(layer):
        name = plain[layer.name]
        reader = name.removesuffix("_cbn")  # which `convert` calls a CBN after
        name = plain.get(reader, reader) + name[len(reader) :]
        found, count = name, 1
        while found in taken:
            count += 1
            found = f"{name}_{count}"
        taken.add(found)
        return found

    return unique


def check_bounds(name, bounds, positive):
    """Raises a ValueError unless these are two numbers, with others between them."""
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    if not is_pair or not all(
        isinstance(bound, Real) and not isinstance(bound, bool) for bound in bounds
    ):
        raise _wrong(name, "two numbers, or None", bounds)
    low, high = bounds
    if not ((low > 0 if positive else low >= 0) and low < high <= sys.float_info.max):
        kind = "positive" if positive else "not negative"
        raise _wrong(name, f"two finite numbers, {kind}, the less one first", bounds)


def _wrong(name, expected, value):
    return ValueError(
        f"Argument `{name}` must be {expected}. Received: {name}={value!r}"
    )
