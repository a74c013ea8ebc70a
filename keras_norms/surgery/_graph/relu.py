"""Replace the ReLUs of Keras by the functions of this package, and back."""

import keras

from keras_norms.activations import relu, relu6
from keras_norms.surgery._graph import linear

_OF_KERAS = keras.activations.relu, keras.activations.relu6
_OWN = relu, relu6


def take_own_relu(units, everywhere):
    """Replace the ReLU of layers by one whose gradient reads its output.

    Unless `everywhere`, only where nothing else reads the input of the ReLU. In a
    DenseNet later layers read it too, and keeping the output as well costs memory.
    """
    found = [u for u in units if everywhere or _input_is_its_own(u)]
    for unit in found:
        if unit.cls is keras.layers.ReLU:
            _become_activation(unit)
    _exchange(found, _OF_KERAS, _OWN)


def take_relu_of_keras(units):
    """Give layers the functions of Keras back."""
    _exchange(units, _OWN, _OF_KERAS)


def _become_activation(unit):
    """Turn a `keras.layers.ReLU` that is "relu" or "relu6" into an `Activation`."""
    config = dict(unit.config)
    highest = config.pop("max_value")
    slope, threshold = config.pop("negative_slope"), config.pop("threshold")
    if highest in (None, 6) and slope == threshold == 0:
        activation = "relu" if highest is None else "relu6"
        unit.become(keras.layers.Activation, {**config, "activation": activation}, {})


def _input_is_its_own(unit):
    """Whether a linear layer or a sum makes what the ReLU reads, for it alone."""
    if unit.cls not in (keras.layers.Activation, keras.layers.ReLU):
        return True
    makers = [node.input.node.unit for node in unit.nodes if node.input.is_private]
    return len(makers) == len(unit.nodes) and all(
        linear.is_linear(maker) or maker.cls.__name__ == "Add" for maker in makers
    )


def _exchange(units, olds, news):
    olds, news = (list(map(keras.activations.serialize, each)) for each in (olds, news))
    for unit in units:
        if unit.cls in (keras.layers.Activation, *linear.PLAIN):
            activation = unit.config.get("activation")
            if activation in olds:
                unit.configure(activation=news[olds.index(activation)])
