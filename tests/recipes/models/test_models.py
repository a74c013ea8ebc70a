import functools

import keras
import numpy as np
import pytest

from keras_norms import CBN, CWN, WN, WS
from recipes import models
from recipes.models import norms

LINEAR = (keras.layers.Conv2D, keras.layers.Dense)
NORMS = (CBN, keras.layers.BatchNormalization)


def before(layer):
    """The layer that makes the input of this one."""
    return layer.input._keras_history.operation


def after(layer):
    """The only layer that reads the output of this one."""
    (node,) = layer._outbound_nodes
    return node.operation


def of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def build(name, norm, size=8, channels=1, activation="relu"):
    return models.build(name, (size, size, channels), 10, norm, activation)


@pytest.mark.parametrize("name,convs", [("resnet20", 21), ("vgg16", 13)])
def test_cbn_stands_before_each_linear_layer_but_the_first(name, convs):
    model = build(name, "cbn")
    first, *others = of(model, LINEAR)
    assert len(of(model, keras.layers.Conv2D)) == convs
    assert isinstance(before(first), keras.layers.InputLayer)
    assert all(isinstance(before(layer), CBN) for layer in others)
    # One CBN a linear layer, but for the shortcuts, which share that of conv1.
    shortcuts = [layer for layer in others if layer.name.endswith("shortcut")]
    assert len(shortcuts) == (2 if name == "resnet20" else 0)
    assert len(of(model, NORMS)) == len(others) - len(shortcuts)
    assert all(layer.use_bias for layer in (first, *others))
    pools = (keras.layers.MaxPooling2D, keras.layers.GlobalAveragePooling2D)
    for norm in of(model, CBN):
        assert isinstance(before(norm), (keras.layers.Activation, *pools))


def test_vgg11():
    model = build("vgg11", "bn", size=32, channels=3)
    filters = [layer.filters for layer in of(model, keras.layers.Conv2D)]
    assert filters == [64, 128, 256, 256, 512, 512, 512, 512]
    assert len(of(model, keras.layers.MaxPooling2D)) == 5


@pytest.mark.parametrize("name,convs", [("resnet20", 21), ("vgg16", 13)])
def test_bn_stands_after_each_convolution(name, convs):
    model = build(name, "bn")
    found = of(model, NORMS)
    assert [before(norm) for norm in found] == of(model, keras.layers.Conv2D)
    assert len(found) == convs
    assert not any(conv.use_bias for conv in of(model, keras.layers.Conv2D))
    assert of(model, keras.layers.Dense)[0].use_bias
    assert not isinstance(before(of(model, keras.layers.Dense)[0]), NORMS)


@pytest.mark.parametrize("name", ["resnet20", "vgg16"])
def test_none(name):
    model = build(name, "none")
    assert not of(model, NORMS)
    assert all(layer.use_bias for layer in of(model, LINEAR))


@pytest.mark.parametrize("norm", ["bn", "cbn", "none"])
def test_residual_blocks(norm):
    model = build("resnet20", norm)
    sums = of(model, keras.layers.Add)
    assert len(sums) == 9
    for layer in sums:
        block = layer.name.removesuffix("_sum")
        shortcut, branch = (x._keras_history.operation for x in layer.input)
        if norm == "bn":
            assert branch.name == f"{block}_conv2_norm"
            branch = before(branch)
        assert branch.name == f"{block}_conv2"
        conv1 = model.get_layer(f"{block}_conv1")
        if block in ("stage2_block0", "stage3_block0"):
            shortcut = before(shortcut) if norm == "bn" else shortcut
            assert shortcut.name == f"{block}_shortcut"
            assert shortcut.kernel_size == (1, 1) and shortcut.strides == (2, 2)
            assert before(shortcut) is before(conv1)
        else:
            x = before(before(conv1)) if norm == "cbn" else before(conv1)
            assert shortcut is x and isinstance(x, keras.layers.Activation)
        activation = model.get_layer(f"{block}_activation")
        assert before(activation) is layer
    assert before(model.get_layer("pool")).name == "stage3_block2_activation"


def test_activation_inside_the_branch():
    norm = norms.get("cbn")
    model = models.resnet(8, (8, 8, 1), 10, norm, "relu", activate_sum=False)
    for layer in of(model, keras.layers.Add):
        block = layer.name.removesuffix("_sum")
        branch = layer.input[1]._keras_history.operation
        assert branch.name == f"{block}_activation"
        assert before(branch).name == f"{block}_conv2"


@pytest.mark.parametrize("depth", [8, 20, 32])
def test_depth(depth):
    model = build(f"resnet{depth}", "bn")
    shortcuts = 2
    assert len(of(model, LINEAR)) == depth + shortcuts
    assert model.name == f"resnet{depth}"


@pytest.mark.parametrize("size,channels", [(8, 1), (28, 1), (32, 3)])
@pytest.mark.parametrize("name,last", [("resnet8", 4), ("vgg16", 32)])
def test_sizes(name, last, size, channels):
    model = build(name, "cbn", size, channels)
    assert model.output_shape == (None, 10)
    final = model.get_layer("pool").input.shape[1:3]
    assert final == ((size // last or 1,) * 2 if size != 28 or last == 4 else (1, 1))
    x = np.zeros((2, size, size, channels), "float32")
    assert model(x, training=True).shape == (2, 10)


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "relu", "selu", "swish"])
def test_activations(activation):
    model = build("resnet8", "cbn", activation=activation)
    expected = keras.activations.get(activation)
    found = of(model, keras.layers.Activation)
    assert len(found) == 7 and all(layer.activation is expected for layer in found)


def test_cbn_arguments_and_a_norm_of_ones_own():
    model = models.build("resnet8", (8, 8, 1), 10, "cbn", "relu", rho=2.0, omega=3.0)
    for layer in of(model, CBN):
        assert (layer.initial_rho, layer.omega) == (2.0, 3.0)
    norm = norms.Norm(lambda channels, name: CBN(decouple=False, name=name), "after")
    model = build("resnet8", norm)
    assert [before(layer) for layer in of(model, CBN)] == of(model, keras.layers.Conv2D)
    assert not any(layer.decouple for layer in of(model, CBN))


def test_names_are_readable():
    names = {layer.name for layer in build("resnet8", "cbn").layers}
    assert {"stem", "stage1_block0_conv1", "stage3_block0_conv2_norm"} <= names
    assert {"logits", "logits_norm", "stage2_block0_shortcut"} <= names


def test_bad_arguments():
    with pytest.raises(ValueError, match="resnet20.*model='resnet21'"):
        build("resnet21", "bn")
    with pytest.raises(ValueError, match="vgg16.*model='alexnet'"):
        build("alexnet", "bn")
    for width in ("", "0", "0.0", "-1", "half", "0.5_2"):
        with pytest.raises(ValueError, match=f"vgg16_0.25.*model='vgg16_{width}'"):
            build(f"vgg16_{width}", "bn")
    with pytest.raises(ValueError, match="may have a width.*model='resnet50_0.5'"):
        build("resnet50_0.5", "bn")
    with pytest.raises(ValueError, match="bn.*cbn.*none.*norm='ln'"):
        build("resnet8", "ln")
    with pytest.raises(ValueError, match="sigmoid.*activation='sine'"):
        build("resnet8", "bn", activation="sine")
    with pytest.raises(ValueError, match="6n.*depth=9"):
        models.resnet(9, (8, 8, 1), 10, norms.get("bn"), "relu")


@pytest.mark.parametrize("norm", sorted(norms.NORMS))
def test_every_norm_trains_a_step(norm):
    model = build("resnet8", norm, channels=3)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8, 8, 8, 3)).astype("float32")
    history = model.fit(images, np.arange(8), epochs=1, batch_size=8, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(model)
    )
    assert [layer.name for layer in again.layers] == [
        layer.name for layer in model.layers
    ]


@pytest.mark.parametrize("norm,wrapper", [("ws+gn", WS), ("cwn+bn", CWN), ("wn", WN)])
@pytest.mark.parametrize("name,convs", [("resnet20", 21), ("vgg16", 13)])
def test_kernels_of_all_convolutions_are_normalised(norm, wrapper, name, convs):
    model = build(name, norm)
    wrapped = of(model, wrapper)
    assert len(wrapped) == convs
    assert not of(model, keras.layers.Conv2D)
    assert all(layer.layer.use_bias == (norm == "wn") for layer in wrapped)
    assert len(of(model, keras.layers.GroupNormalization)) == convs * (norm == "ws+gn")


def test_groups_have_at_least_four_channels():
    groups = [norms.group_normalization(n, "x").groups for n in (4, 16, 64, 512, 12)]
    assert groups == [1, 4, 16, 32, 3]


# The networks for ImageNet: trainable weights with BatchNormalization and 1000 classes,
# as PyTorch counts them for the same networks; linear layers; activations.
IMAGENET = {
    "resnet18": (11_689_512, 21, 17),
    "resnet34": (21_797_672, 37, 33),
    "resnet50": (25_557_032, 54, 49),
    "resnet101": (44_549_160, 105, 100),
    "densenet121": (7_978_856, 121, 121),
    "densenet169": (14_149_480, 169, 169),
    "efficientnetb0": (5_288_548, 82, 49),
}
CONVOLUTIONS = (keras.layers.Conv2D, keras.layers.DepthwiseConv2D)
ALL_LINEAR = (*LINEAR, keras.layers.DepthwiseConv2D)
PASSED = (
    keras.layers.ZeroPadding2D,
    keras.layers.Dropout,
    keras.layers.Reshape,
    keras.layers.GlobalAveragePooling2D,
)


@functools.lru_cache(maxsize=2)
def imagenet(name, norm):
    return models.build(name, (32, 32, 3), 1000, norm, "tanh", rho=2.0)


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_networks_with_bn(name):
    model = imagenet(name, "bn")
    weights, linear, activations = IMAGENET[name]
    count = sum(np.prod(v.shape) for v in model.trainable_variables)
    assert count == weights
    assert len(of(model, ALL_LINEAR)) == linear
    functions = [getattr(layer, "activation", None) for layer in model.layers]
    assert functions.count(keras.activations.tanh) == activations
    gates = 16 if name == "efficientnetb0" else 0
    assert functions.count(keras.activations.sigmoid) == gates
    found = of(model, keras.layers.BatchNormalization)
    assert all((layer.momentum, layer.epsilon) == (0.9, 1e-5) for layer in found)
    convolutions = of(model, CONVOLUTIONS)
    if name.startswith("densenet"):
        # Each stands before an activation, and between it and a convolution may be more
        # that is concatenated.
        assert len(found) == activations
        normalised = convolutions
    else:
        normalised = [before(layer) for layer in found]
    assert all(isinstance(layer, CONVOLUTIONS) for layer in normalised)
    for layer in convolutions:
        assert layer.use_bias == (layer not in normalised)
    assert isinstance(model.layers[0], keras.layers.InputLayer)
    assert not of(model, (keras.layers.Rescaling, keras.layers.Normalization))
    assert model.output_shape == (None, 1000)
    assert model.layers[-1].activation is keras.activations.linear


@pytest.mark.parametrize("name", [x for x in IMAGENET if x[-3:] not in ("101", "169")])
def test_imagenet_networks_with_cbn(name):
    model = imagenet(name, "cbn")
    _, linear, _ = IMAGENET[name]
    first, *others = of(model, ALL_LINEAR)
    assert len(others) == linear - 1
    assert not of(model, keras.layers.BatchNormalization)
    for layer in (first, *others):
        assert layer.use_bias
        while isinstance(before(layer), PASSED):
            layer = before(layer)
        above = before(layer)
        if layer is first or above is model.layers[0]:
            continue
        assert isinstance(above, CBN)
        assert float(keras.ops.convert_to_numpy(above.rho)) == 2.0
    shortcuts = {"resnet18": 3, "resnet34": 3, "resnet50": 4}.get(name, 0)
    assert len(of(model, CBN)) == linear - 1 - shortcuts


def test_densenet_without_a_norm_or_with_layer_normalization():
    model = imagenet("densenet121", "none")
    activations = of(model, keras.layers.Activation)
    assert len(activations) == 121
    kinds = (*CONVOLUTIONS, keras.layers.Concatenate, keras.layers.AveragePooling2D)
    kinds += (keras.layers.MaxPooling2D,)
    assert all(isinstance(before(layer), kinds) for layer in activations)
    assert not of(model, NORMS)
    assert all(layer.use_bias for layer in of(model, keras.layers.Conv2D))
    model = imagenet("densenet121", "layer")
    found = of(model, keras.layers.GroupNormalization)
    assert len(found) == 121 and {layer.groups for layer in found} == {1}
    assert all(isinstance(after(layer), keras.layers.Activation) for layer in found)
    assert not any(layer.use_bias for layer in of(model, keras.layers.Conv2D))


@pytest.mark.parametrize("norm,wrapper", [("none", None), ("ws+gn", WS)])
def test_imagenet_networks_with_other_norms(norm, wrapper):
    model = imagenet("efficientnetb0", norm)
    assert not of(model, NORMS)
    if wrapper is None:
        assert all(layer.use_bias for layer in of(model, ALL_LINEAR))
        return
    wrapped = of(model, wrapper)
    assert len(wrapped) == 81
    assert len(of(model, keras.layers.GroupNormalization)) == 49
    gated = [layer for layer in wrapped if "_se_" in layer.name]
    assert len(gated) == 32
    assert all(layer.layer.use_bias == (layer in gated) for layer in wrapped)


def test_imagenet_networks_train():
    model = models.build("resnet18", (32, 32, 3), 10, "cbn", "sigmoid")
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    assert keras.ops.convert_to_numpy(keras.ops.isfinite(model(x, training=True))).all()
    assert model.get_layer("stem").output.shape == (None, 16, 16, 64)
    assert model.get_layer("pool").input.shape == (None, 1, 1, 512)


def test_dtype():
    before = keras.config.dtype_policy()
    model = models.build(
        "resnet8", (8, 8, 1), 10, "cbn", "relu", dtype="mixed_bfloat16"
    )
    assert keras.config.dtype_policy() == before
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
    assert {str(v.dtype) for v in model.trainable_variables} == {"float32"}


def test_images_that_are_too_small_for_the_network():
    with pytest.raises(ValueError, match="32x32.*input_shape=\\(8, 8, 1\\)"):
        build("resnet50", "bn")


@pytest.mark.parametrize("name", ["vgg16", "resnet8"])
def test_width_in_the_name(name):
    full, quarter = build(name, "bn"), build(f"{name}_0.25", "bn")
    filters, fewer = (
        [layer.filters for layer in of(model, keras.layers.Conv2D)]
        for model in (full, quarter)
    )
    assert fewer == [count / 4 for count in filters]
    assert quarter.name == full.name


def test_scaled():
    channels = [4, 8, 16, 16, 32, 32, 32, 32]
    model = models.scaled(build("resnet20", "ws+gn"), 0.25)
    convolutions = [layer.layer for layer in of(model, WS)]
    assert {layer.filters for layer in convolutions} == {4, 8, 16}
    for layer in of(model, keras.layers.GroupNormalization):
        assert layer.input.shape[-1] / layer.groups == 4
    assert model.output_shape == (None, 10)
    model = models.scaled(build("vgg11", "cbn_fixed"), 0.0625)
    filters = [layer.filters for layer in of(model, keras.layers.Conv2D)]
    assert filters == channels
    # What a layer was told stays: its eta is 0.9.
    told = [float(keras.ops.convert_to_numpy(x.learning_rate)) for x in of(model, CBN)]
    np.testing.assert_allclose(told, 0.1, rtol=1e-6)
    assert len(told) == 8
