"""Norms that run with their stored statistics, in training too."""

from typing import Any

import keras

from keras_norms._types import Tensor
from keras_norms.layers.cbn import CBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN


class Frozen(keras.layers.Layer):
    """Mixin before a norm: every call is one at inference; gamma and beta may train.

    Nothing else differs from the classes that they freeze. A layer is frozen, and
    unfrozen, by a change of its class. The mixin is a layer because Python changes a
    class only to one with the same base, also where layers of Keras are NNX modules.
    """

    def call(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Any:
        return super().call(inputs, training=False)

    def scale_and_shift(
        self, inputs: Tensor, training: bool | None = None, mask: Tensor | None = None
    ) -> Any:
        return super().scale_and_shift(inputs, training=False)  # type: ignore[misc]


def _frozen(plain):
    doc = f"`{plain.__name__}` with stored statistics."
    named = {"__module__": __name__, "__doc__": doc}
    cls = type(f"Frozen{plain.__name__}", (Frozen, plain), named)
    return keras.saving.register_keras_serializable("keras_norms")(cls)


# From each class to its frozen one.
FROZEN = {
    plain: _frozen(plain)
    for plain in (keras.layers.BatchNormalization, CBN, NoisyBN, LpNorm)
}
# Under these names `pickle` and `keras.saving` find them.
FrozenBatchNormalization, FrozenCBN, FrozenNoisyBN, FrozenLpNorm = FROZEN.values()


def set_frozen(layer: keras.layers.Layer, frozen: bool) -> bool:
    """Freeze the statistics of a norm, or let them move again.

    Returns:
        Whether its class can be frozen.
    """
    plain = plain_class(type(layer))
    if plain not in FROZEN:
        return False
    # Past Keras, which would look for weights in the attribute.
    object.__setattr__(layer, "__class__", FROZEN[plain] if frozen else plain)
    return True


def is_frozen(layer: keras.layers.Layer) -> bool:
    """Whether a norm runs with its stored statistics in training too."""
    return not layer.trainable or isinstance(layer, Frozen)


def plain_class(cls: type) -> type:
    """The class of a layer; of a frozen one, the class that was frozen."""
    return cls.__mro__[2] if issubclass(cls, Frozen) else cls
