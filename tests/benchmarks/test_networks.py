"""The networks of the benchmarks and what is said of them."""

import keras
import pytest

from benchmarks import network, networks
from keras_norms import CBN
from keras_norms.layers.fused_cbn import FusedCBN


def count(model, cls):
    return sum(isinstance(layer, cls) for layer in model._flatten_layers())


@pytest.mark.parametrize(
    "norm, batch_normalizations, cbns, fused",
    [("bn", 21, 0, 0), ("none", 0, 0, 0), ("cbn", 0, 19, 0), ("fused_cbn", 0, 19, 19)],
)
def test_resnet20_has_the_norm(norm, batch_normalizations, cbns, fused):
    model = networks.build("resnet20", norm)
    assert count(model, keras.layers.BatchNormalization) == batch_normalizations
    assert count(model, CBN) == cbns
    assert count(model, FusedCBN) == fused


def test_image_size():
    assert networks.build("vgg16", "bn", 16).input_shape == (None, 16, 16, 3)
    assert networks.build("vgg16", "bn").input_shape == (None, 32, 32, 3)


def test_cbn_is_told_a_rate():
    model = networks.build("resnet20", "cbn", learning_rate=0.25)
    rates = [x.learning_rate for x in model._flatten_layers() if isinstance(x, CBN)]
    assert {float(keras.ops.convert_to_numpy(rate)) for rate in rates} == {0.25}


def test_unknown_norm():
    with pytest.raises(ValueError, match="norm=layer"):
        networks.build("resnet20", "layer")


def pair(dtype):
    return keras.Sequential(
        [
            keras.Input((4, 4, 3)),
            keras.layers.BatchNormalization(dtype=dtype),
            keras.layers.Conv2D(5, 1, dtype=dtype),
            keras.layers.BatchNormalization(dtype=dtype),
        ]
    )


def test_bytes_of_passes():
    elements = 2 * 4 * 4 * (3 + 5)
    model = pair("float32")
    assert network.bytes_of_passes(model, 2, cache=0) == 8 * 4 * elements
    # Inside of the cache each tensor moves once.
    assert network.bytes_of_passes(model, 2, cache=2**20) == 5 * 4 * elements
    # 3 * 4 * 96 and 3 * 4 * 160 bytes: one of the two fits.
    between = network.bytes_of_passes(model, 2, cache=1500)
    assert between == 4 * 2 * 16 * (5 * 3 + 8 * 5)


def test_bytes_of_passes_in_half_precision():
    elements = 2 * 4 * 4 * (3 + 5)
    model = pair("mixed_bfloat16")
    assert network.bytes_of_passes(model, 2, cache=0) == 8 * 2 * elements


def test_no_passes_without_norms():
    assert network.bytes_of_passes(networks.build("resnet20", "none"), 2, 0) == 0


def test_parse():
    assert networks.parse("resnet20:32:128") == ("resnet20", 32, 128)


@pytest.mark.parametrize("text", ["resnet20", "resnet20:32", "other:1:2", "vgg16:a:1"])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match=f"Received: {text}"):
        networks.parse(text)
