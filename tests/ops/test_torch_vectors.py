"""On PyTorch, how many operations a layer starts: each takes time, on a GPU its own."""

import keras
import pytest

from keras_norms import CBN, FusedCBN
from tests.support.backend import torch_only


def operations(function, *args, **options):
    """How many operations of PyTorch a function starts, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        started = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.started += 1
            return operation(*args, **(kwargs or {}))

    with Count() as count:
        function(*args, **options)
    return count.started


@torch_only
@pytest.mark.parametrize("shape", [(128, 64), (4, 5, 5, 8), (64, 16, 16, 8)])
def test_a_training_step_starts_few_operations(shape):
    x = keras.random.normal(shape).requires_grad_()
    started = {}
    for layer in (CBN(rho=2.0), keras.layers.BatchNormalization()):
        layer(x, training=True)
        if isinstance(layer, CBN):
            layer.set_learning_rate(0.03)  # averages and batch both count
        y = layer(x, training=True)
        started[type(layer)] = (
            operations(layer, x, training=True),
            operations(y.backward, y.detach()),
        )
    (forward, backward), (_, of_bn) = started.values()
    assert forward <= 70  # 27 of BatchNormalization; as on other backends, 92
    assert backward <= of_bn


@torch_only
def test_a_fused_layer_starts_few_more():
    conv = keras.layers.Conv2D(16, 3, padding="same")
    layer, x = FusedCBN(conv, CBN()), keras.random.normal((8, 12, 12, 8))
    layer(x, training=True)
    layer.norm.set_learning_rate(0.03)
    y = layer(x.requires_grad_(), training=True)
    assert operations(layer, x, training=True) <= 95  # CBN and a convolution: 76
    assert operations(y.backward, y.detach()) <= 62  # 41
