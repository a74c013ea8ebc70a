"""PyTorch starts operations one by one, which takes time, and assigns in place."""

import keras
import numpy as np
import pytest

from keras_norms import CBN, FusedCBN, LpNorm, NoisyBN
from tests.support.backend import numpy, torch_only


def operations(function, *args, **options):
    """How many operations of PyTorch a function starts, views included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    started = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            started.append(operation)
            return operation(*args, **(kwargs or {}))

    with Count():
        function(*args, **options)
    return len(started)


def of_a_step(layer, shape):
    """Those of a training call of a layer, and of its gradient."""
    x = keras.random.normal(shape).requires_grad_()
    layer(x, training=True)
    for norm in (n for n in layer._flatten_layers() if isinstance(n, CBN)):
        norm.set_learning_rate(0.03)  # averages and batch both count
    y = layer(x, training=True)
    return operations(layer, x, training=True), operations(y.backward, y.detach())


@torch_only
# A large tensor with fewer than 16 channels starts more, which take less time.
@pytest.mark.parametrize("shape", [(128, 64), (4, 5, 5, 8), (64, 16, 16, 16)])
def test_a_training_step_starts_few_operations(shape):
    forward, backward = of_a_step(CBN(rho=2.0), shape)
    _, of_bn = of_a_step(keras.layers.BatchNormalization(), shape)
    assert forward <= 45  # 27 of BatchNormalization; as on other backends, 92
    assert backward <= of_bn


@torch_only
def test_a_fused_layer_starts_few_more():
    conv = keras.layers.Conv2D(16, 3, padding="same")
    forward, backward = of_a_step(FusedCBN(conv, CBN()), (8, 12, 12, 8))
    assert forward <= 70  # CBN and a convolution: 50
    assert backward <= 66  # 41; with PyTorch 2.8 it is 65, with 2.13 59


@torch_only
@pytest.mark.parametrize(
    "make",
    [
        CBN,
        LpNorm,
        lambda: FusedCBN(keras.layers.Conv2D(16, 3, padding="same"), CBN()),
    ],
)
def test_a_training_step_does_not_wait_for_a_gpu(make, monkeypatch):
    """It would, where Keras makes a number or an array a tensor."""
    import torch

    layer, x = make(), keras.random.normal((8, 12, 12, 8)).requires_grad_()
    layer(x, training=True)
    as_tensor, waits = torch.as_tensor, []

    def spy(value, **options):
        if "device" in options and not isinstance(value, torch.Tensor):
            waits.append(value)
        return as_tensor(value, **options)

    monkeypatch.setattr(torch, "as_tensor", spy)
    keras.ops.convert_to_tensor(1.0)
    assert waits.pop() == 1
    layer(x, training=True).sum().backward()
    for norm in (n for n in layer._flatten_layers() if isinstance(n, CBN)):
        norm.set_learning_rate(0.03)
    assert not waits


@torch_only
@pytest.mark.parametrize("size", [4, 2**10])  # with plain operations and with kernels
@pytest.mark.parametrize("cls", [CBN, NoisyBN, LpNorm])
def test_a_call_at_inference_and_then_a_training_step(cls, size):
    """The gradient of the call is that of the averages it had."""
    layer = cls(**{"decouple": False} if cls is CBN else {})
    x = keras.random.normal((size, 64), 3.0).requires_grad_()
    gradients = []
    for step in (lambda: None, lambda: layer(x, training=True)):
        y = layer(x)
        step()
        y.sum().backward()
        gradients.append(numpy(x.grad))
        x.grad = None
    np.testing.assert_array_equal(*gradients)
