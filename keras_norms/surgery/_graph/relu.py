"""The activation "relu" of layers, and the function of this package in its place."""

import keras

from keras_norms.activations import relu
from keras_norms.surgery._graph import linear


def take_own_relu(units, everywhere):
    """Let layers with a ReLU have one whose gradient reads the output.

    Unless `everywhere`, only where nothing else reads the input of the ReLU. In a
    DenseNet later layers read it too, and keeping the output as well costs memory.
    """
    found = [u for u in units if everywhere or _input_is_its_own(u)]
    _exchange(found, keras.activations.relu, relu)


def take_relu_of_keras(units):
    """Let layers have no function of this package."""
    _exchange(units, relu, keras.activations.relu)


def _input_is_its_own(unit):
    """Whether what the ReLU reads is made by a linear layer or a sum, for it alone."""
    if unit.cls is not keras.layers.Activation:
        return True
    makers = [node.input.node.unit for node in unit.nodes if node.input.is_private]
    return len(makers) == len(unit.nodes) and all(
        linear.is_linear(maker) or maker.cls.__name__ == "Add" for maker in makers
    )


def _exchange(units, old, new):
    old, new = map(keras.activations.serialize, (old, new))
    for unit in units:
        has_one = unit.cls in (keras.layers.Activation, *linear.PLAIN)
        if has_one and unit.config.get("activation") == old:
            unit.configure(activation=new)
