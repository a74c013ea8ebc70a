"""Layers of a model by name, and the learning rate of its optimizer."""

from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import matching_layers


def find_layer(model, layer, argument="layer"):
    """Find the only layer of a model that an argument means."""
    found = matching_layers(model, layer, argument)
    if len(found) > 1:
        raise ValueError(
            f"Argument `{argument}` must be a layer, or the name of only one. "
            f"Received: {argument}={layer!r}, the name of {len(found)} layers"
        )
    return found[0]


def names_of(layers):
    """Name each layer, or give its path where several have that name."""
    names = [layer.name for layer in layers]
    return [
        name if names.count(name) == 1 else layer.path
        for name, layer in zip(names, layers)
    ]


def learning_rate_of(model, learning_rate):
    """Return the rate given, or the one that the optimizer's next step will use."""
    if learning_rate is not None:
        return arguments.number("learning_rate", learning_rate, above=0)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            "Argument `learning_rate` must be given, for the model has no optimizer. "
            "Received: learning_rate=None"
        )
    rate = ops.convert_to_tensor(optimizer.learning_rate)
    return float(ops.convert_to_numpy(rate))
