import keras
import numpy as np
import pytest

from keras_norms import CBN, CWN, WN, WS
from recipes import models
from recipes.models import norms
from tests.support.backend import later, numpy, once

L = keras.layers
CONVOLUTIONS = (L.Conv2D, L.DepthwiseConv2D)
LINEAR = (*CONVOLUTIONS, L.Dense)
NORMS = (CBN, L.BatchNormalization)


def before(layer):
    """The layer that makes the input of this one."""
    return layer.input._keras_history.operation


def of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def build(name, norm, size=8, channels=1, activation="relu", **options):
    shape = (size, size, channels)
    return models.build(name, shape, 10, norm, activation, **options)


# With BatchNormalization and 1000 classes, linear layers, activations, shortcuts; and
# for ImageNet trainable weights, as PyTorch counts them for the same networks.
NETWORKS = {
    "resnet8": (10, 7, 2, None),
    "vgg11": (9, 8, 0, None),
    "mlp16": (4, 3, 0, None),
    "resnet18": (21, 17, 3, 11_689_512),
    "resnet34": (37, 33, 3, 21_797_672),
    "resnet50": (54, 49, 4, 25_557_032),
    "resnet101": (105, 100, 4, 44_549_160),
    "densenet121": (121, 121, 0, 7_978_856),
    "densenet169": (169, 169, 0, 14_149_480),
    "efficientnetb0": (82, 49, 0, 5_288_548),
}
SMALL = ["resnet8", "vgg11", "mlp16"]
LARGE = [name for name in NETWORKS if name not in (*SMALL, "resnet18")]
# What may stand between a linear layer and its CBN; where that stands in small ones.
PASSED = (L.ZeroPadding2D, L.Dropout, L.Reshape, L.GlobalAveragePooling2D)
NONLINEAR = (L.Activation, L.MaxPooling2D, L.GlobalAveragePooling2D)


def imagenet(name, norm):
    return models.build(name, (32, 32, 3), 1000, norm, "tanh", rho=2.0, omega=3.0)


def test_groups_divide_the_channels_of_any_width():
    model = imagenet("vgg11_0.1", "group")
    for layer in of(model, L.GroupNormalization):
        assert layer.input.shape[-1] % layer.groups == 0


@pytest.mark.parametrize("name", [*SMALL, "resnet18", *later(*LARGE, marks=[once])])
def test_places_of_norms(name):
    linear, activations, shortcuts, weights = NETWORKS[name]
    model = imagenet(name, "bn")
    if weights:
        assert sum(np.prod(v.shape) for v in model.trainable_variables) == weights
    assert len(of(model, LINEAR)) == linear
    functions = [getattr(layer, "activation", None) for layer in model.layers]
    assert functions.count(keras.activations.tanh) == activations
    gates = 16 if name == "efficientnetb0" else 0
    assert functions.count(keras.activations.sigmoid) == gates
    found, convolutions = of(model, L.BatchNormalization), of(model, CONVOLUTIONS)
    assert all((layer.momentum, layer.epsilon) == (0.9, 1e-5) for layer in found)
    normalised = [before(layer) for layer in found]
    if name.startswith("densenet"):
        # Each stands before an activation, and between it and a convolution may be more
        # that is concatenated.
        assert len(found) == activations
        normalised = convolutions
    assert all(isinstance(layer, LINEAR) for layer in normalised)
    assert model.layers[-1] not in normalised
    assert all(each.use_bias == (each not in normalised) for each in of(model, LINEAR))
    assert not of(model, (L.Rescaling, L.Normalization))
    assert model.layers[-1].activation is keras.activations.linear

    model = imagenet(name, "cbn")
    first, *others = of(model, LINEAR)
    assert len(others) == linear - 1 and not of(model, L.BatchNormalization)
    assert all(layer.use_bias for layer in (first, *others))
    for layer in others:
        while isinstance(before(layer), PASSED):
            layer = before(layer)
        assert isinstance(before(layer), CBN) or before(layer) is model.layers[0]
    # One CBN a linear layer, but for the shortcuts, which share that of conv1.
    found = of(model, CBN)
    assert len(found) == linear - 1 - shortcuts
    assert {(layer.initial_rho, layer.omega) for layer in found} == {(2.0, 3.0)}
    if name in SMALL:
        assert all(isinstance(before(layer), NONLINEAR) for layer in found)
    if gates:  # each is two convolutions, and reads the mean of all positions
        model = imagenet(name, "cbn_no_se")
        assert len(of(model, CBN)) == len(found) - 2 * gates
        gated = [layer for layer in of(model, L.Conv2D) if "_se_" in layer.name]
        assert not any(isinstance(before(layer), CBN) for layer in gated)
    model = imagenet(name, "none")
    assert not of(model, NORMS) and all(layer.use_bias for layer in of(model, LINEAR))


def test_noise_alone():
    """Nothing is normalised: y = s x + m, with s and m of Algorithm 1."""
    layer = norms.get("noise").layer(30, name="noise")
    ones = np.ones((500, 30), "float32")
    for training in (True, False):
        shift, scale = (numpy(layer(x * ones, training=training)) for x in (0, 1e6))
        assert 0.3 < np.abs(shift).max() <= 0.6
        scale = scale / 1e6
        assert scale.mean(0).min() > 0.98 and 1.15 < scale.mean(0).max() < 1.27
        np.testing.assert_allclose(scale.std(0), 0.1, rtol=0.2)
    assert not layer.trainable_variables


@pytest.mark.parametrize("norm", ["bn", "cbn"])
def test_residual_blocks(norm):
    model = build("resnet20", norm)
    sums = of(model, L.Add)
    assert len(sums) == 9
    for layer in sums:
        block = layer.name.removesuffix("_sum")
        shortcut, branch = (x._keras_history.operation for x in layer.input)
        conv1, x = model.get_layer(f"{block}_conv1"), branch
        assert branch.name == f"{block}_conv2" + "_norm" * (norm == "bn")
        if block in ("stage2_block0", "stage3_block0"):
            shortcut = before(shortcut) if norm == "bn" else shortcut
            assert shortcut.name == f"{block}_shortcut"
            assert shortcut.kernel_size == (1, 1) and shortcut.strides == (2, 2)
            assert before(shortcut) is before(conv1)
        else:
            x = before(before(conv1)) if norm == "cbn" else before(conv1)
            assert shortcut is x and isinstance(x, L.Activation)
        assert before(model.get_layer(f"{block}_activation")) is layer
    model = models.resnet(8, (8, 8, 1), 10, norms.get(norm), "relu", activate_sum=False)
    for layer in of(model, L.Add):
        branch = layer.input[1]._keras_history.operation
        assert branch.name == layer.name.replace("_sum", "_activation")


@pytest.mark.parametrize("size,channels", [(8, 1), (32, 3)])
def test_sizes_and_widths(size, channels):
    finals = {("resnet8", 10): size // 4, ("vgg11_0.25", 9): max(1, size // 32)}
    for (name, linear), final in finals.items():
        model = build(name, "cbn_fixed", size, channels, "selu", dtype="mixed_bfloat16")
        assert len(of(model, LINEAR)) == linear
        assert model.get_layer("pool").input.shape[1:3] == (final, final)
        found = {layer.activation for layer in of(model, L.Activation)}
        assert found == {keras.activations.selu}
        assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
        assert {str(v.dtype) for v in model.trainable_variables} == {"float32"}
        y = numpy(keras.ops.cast(model(np.zeros((2, size, size, channels))), "float32"))
        assert y.shape == (2, 10) and np.isfinite(y).all()
    filters = [16, 32, 64, 64, 128, 128, 128, 128]
    assert [layer.filters for layer in of(model, L.Conv2D)] == filters
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize("norm,wrapper", [("ws+gn", WS), ("cwn+bn", CWN), ("wn", WN)])
def test_kernels_of_all_convolutions_are_normalised(norm, wrapper):
    model = build("resnet8_0.25", norm)
    wrapped, groups = of(model, wrapper), of(model, L.GroupNormalization)
    assert len(wrapped) == 9 and not of(model, L.Conv2D)
    assert all(layer.layer.use_bias == (norm == "wn") for layer in wrapped)
    assert {layer.layer.filters for layer in wrapped} == {4, 8, 16}
    assert len(groups) == 9 * (norm == "ws+gn") and model.output_shape == (None, 10)
    assert all(layer.input.shape[-1] == 4 * layer.groups for layer in groups)
    expected = {4: 1, 16: 4, 64: 16, 512: 32, 12: 3}  # of at least four channels
    for channels, count in expected.items():
        assert norms.group_normalization(channels, "x").groups == count


def test_bad_arguments():
    for name, message in (
        ("resnet21", "resnet20.*model='resnet21'"),
        ("resnet50_0.5", "may have a width.*model='resnet50_0.5'"),
        ("resnet50", r"32x32.*input_shape=\(8, 8, 1\)"),
        ("vgg16_0", "vgg16_0.25.*mod"),
        ("mlp0", "such as 'mlp256'.*model='mlp0'"),
        ("mlp16_0.5", "may have a width.*model='mlp16_0.5'"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, "bn")
    with pytest.raises(ValueError, match="bn.*cbn.*none.*norm='ln'"):
        build("resnet8", "ln")
    with pytest.raises(ValueError, match="`rho` must be.*rho=0"):
        build("resnet8", "cbn", rho=0.0)
    for text in ("", "stage1", "stage1=x", "=1", "stage1=0"):
        with pytest.raises(ValueError, match="`stage_rho` must be like"):
            norms.stage_rho(1.0, text)


@once
@pytest.mark.thorough
def test_kernels_of_a_network_for_imagenet():
    model = imagenet("efficientnetb0", "ws+gn")
    wrapped = of(model, WS)
    gated = [layer for layer in wrapped if "_se_" in layer.name]
    assert (len(wrapped), len(gated)) == (81, 32)
    assert len(of(model, L.GroupNormalization)) == 49
    assert all(layer.layer.use_bias == (layer in gated) for layer in wrapped)


def test_stages():
    for name, stage in (
        ("conv3_block1_1_conv", "conv3"),
        ("block5a_expand_conv", "block5"),
        ("predictions", "predictions"),
    ):
        assert norms.stage(name) == stage
    model = build("resnet8", "cbn", rho=norms.stage_rho(4.0, "stage1=0.5,logits=2"))
    found = {(norms.stage(x.name), x.initial_rho) for x in of(model, CBN)}
    assert found == {("stage1", 0.5), ("stage2", 4), ("stage3", 4), ("logits", 2)}
    norms.check_stages("stage1=0.5", model)
    with pytest.raises(ValueError, match="name stages with CBN.*'stage3'.*stage7=1"):
        norms.check_stages("stage7=1", model)
