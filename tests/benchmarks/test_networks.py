"""The networks of the benchmarks and what is said of them."""

import functools

import keras
import pytest

from benchmarks import network, networks
from keras_norms import CBN, FusedCBN, LpNorm
from tests.support.backend import later, numpy, thorough_on

pytestmark = thorough_on("jax")


@pytest.mark.parametrize(
    "norm, batch_normalizations, cbns, fused",
    [
        ("bn", 21, 0, 0),
        ("none", 0, 0, 0),
        *later(("cbn", 0, 19, 0), ("fused_cbn", 0, 19, 19)),
    ],
)
def test_resnet20_has_the_norm(norm, batch_normalizations, cbns, fused):
    model = networks.build("resnet20", norm, learning_rate=0.25)
    layers = model._flatten_layers()
    kinds = [type(layer) for layer in layers]
    assert kinds.count(keras.layers.BatchNormalization) == batch_normalizations
    assert (kinds.count(CBN), kinds.count(FusedCBN)) == (cbns, fused)
    rates = {float(numpy(x.learning_rate)) for x in layers if isinstance(x, CBN)}
    assert rates == ({0.25} if cbns else set())
    assert (network.bytes_of_passes(model, 2, 0) == 0) == (norm == "none")


def test_build():
    for norm, p in (("lp_norm", 2), ("lp_norm:1", 1)):
        layers = networks.build("resnet20", norm)._flatten_layers()
        assert [each.p for each in layers if isinstance(each, LpNorm)] == [p] * 21
    assert networks.build("vgg16", "bn", 16).input_shape == (None, 16, 16, 3)
    assert networks.build("vgg16", "bn").input_shape == (None, 32, 32, 3)
    with pytest.raises(ValueError, match="norm=layer"):
        networks.build("resnet20", "layer")


@pytest.mark.parametrize(
    "dtype, cache, expected",
    [
        ("float32", 0, 8 * 4 * (96 + 160)),
        ("mixed_bfloat16", 0, 8 * 2 * (96 + 160)),
        # Inside of the cache each tensor moves once.
        ("float32", 2**20, 5 * 4 * (96 + 160)),
        # 3 * 4 * 96 and 3 * 4 * 160 bytes: one of the two fits.
        ("float32", 1500, 4 * (5 * 96 + 8 * 160)),
    ],
)
def test_bytes_of_passes(dtype, cache, expected):
    bn = functools.partial(keras.layers.BatchNormalization, dtype=dtype)
    conv = keras.layers.Conv2D(5, 1, dtype=dtype)
    model = keras.Sequential([keras.Input((4, 4, 3)), bn(), conv, bn()])
    assert network.bytes_of_passes(model, 2, cache) == expected


def test_parse():
    assert networks.parse("resnet20:32:128") == ("resnet20", 32, 128)
    for text in ("resnet20", "resnet20:32", "other:1:2", "vgg16:a:1"):
        with pytest.raises(ValueError, match=f"Received: {text}"):
            networks.parse(text)
