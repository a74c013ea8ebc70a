"""Layers of a model by name, and the learning rate of its optimizer."""

from keras import ops

from keras_norms import _keras
from keras_norms._checks import arguments


def matching_layers(model, layer, argument="layers"):
    """List the layers of a model, nested ones too, that an argument means.

    Args:
        layer: A layer, which means itself, or a name or path, which may mean several.
        argument: The name of the argument.

    Raises:
        ValueError: If there is none.
    """
    layers = _keras.layers_of(model, include_self=False)
    name = layer if isinstance(layer, str) else object()
    found = [e for e in layers if e is layer or e.name == name or e.path == name]
    if found:
        return found
    expected = f"be a layer of model '{model.name}', or its name"
    if argument == "layers":
        expected = f"hold layers of model '{model.name}', or their names"
    raise ValueError(
        f"Argument `{argument}` must {expected}. "
        f"Received: {argument}={arguments.shown(layer)}. "
        f"The model has {[each.name for each in layers]}"
    )


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


def kernels_owned_by(layer):
    """List the trainable weights of rank 2 or more that are a layer's own."""
    own = {id(v) for v in _keras.own_weights(layer) if len(v.shape) > 1}
    return [v for v in layer.trainable_variables if id(v) in own]


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
