"""convert and fold over the networks of keras-hub, whose blocks are layers themselves.

    KERAS_BACKEND=torch python -m benchmarks.hub            # the fastest for this
    python -m benchmarks.hub --networks=MobileNetV3,HGNetV2

Each network is built small, without presets, with random weights as in
`benchmarks.applications`. For each:

* `convert(model, "cbn", data=...)` gives the same outputs and leaves no
  BatchNormalization; how long it takes;
* the model trains two steps, is saved, and loads;
* `fold` of the network, and of the trained one, gives the same outputs with Keras'
  layers only.

A difference is max |a - b| / max |b| over all outputs. Prints a table; --output also
writes it as JSON, and the same command continues with what is missing there.
"""

import functools
import importlib.metadata
import time
import warnings

import keras
import numpy as np
from absl import app, flags
from keras import layers, tree

from benchmarks import compare
from benchmarks.outputs import count, difference, outputs, randomize, reloaded
from keras_norms import AMAT
from keras_norms.layers import CBN, layers_of
from keras_norms.surgery import convert, fold

SIZE = 64
PRESERVE_LIMIT = 1e-4
FOLD_LIMIT = 2e-5


def _models():
    import keras_hub  # Not at import: it takes seconds, and few have it.

    return keras_hub.models


def _resnet(block_type, **settings):
    settings = {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "use_pre_activation": False,
        **settings,
    }
    return _models().ResNetBackbone(
        stackwise_num_filters=[64, 16, 16, 24],
        stackwise_num_blocks=[1, 2, 1, 1],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type=block_type,
        image_shape=(SIZE, SIZE, 3),
        **settings,
    )


def _densenet():
    return _models().DenseNetBackbone(
        [2, 3, 2], image_shape=(SIZE, SIZE, 3), growth_rate=8
    )


def _mobilenet():
    swish = "hard_swish"
    return _models().MobileNetBackbone(
        stackwise_expansion=[[24, 32], [40, 48, 48], [48, 64]],
        stackwise_num_blocks=[2, 3, 2],
        stackwise_num_filters=[[16, 16], [24, 24, 24], [32, 32]],
        stackwise_kernel_size=[[3, 3], [5, 5, 5], [5, 5]],
        stackwise_num_strides=[[2, 1], [2, 1, 1], [2, 1]],
        stackwise_se_ratio=[[None, None], [0.25, 0.25, 0.25], [0.3, 0.25]],
        stackwise_activation=[["relu", "relu"], [swish] * 3, [swish] * 2],
        stackwise_padding=[[1, 1], [2, 2, 2], [2, 2]],
        output_num_filters=48,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=64,
        squeeze_and_excite=0.5,
        image_shape=(SIZE, SIZE, 3),
    )


def _efficientnet(blocks):
    return _models().EfficientNetBackbone(
        stackwise_width_coefficients=[1.0] * 3,
        stackwise_depth_coefficients=[1.0] * 3,
        stackwise_kernel_sizes=[3, 5, 3],
        stackwise_num_repeats=[1, 2, 2],
        stackwise_input_filters=[16, 16, 24],
        stackwise_output_filters=[16, 24, 32],
        stackwise_expansion_ratios=[1, 4, 4],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25, 0.25],
        stackwise_strides=[1, 2, 2],
        stackwise_block_types=blocks,
        stackwise_force_input_filters=[0] * 3,
        stackwise_nores_option=[False] * 3,
        num_features=64,
        input_shape=(SIZE, SIZE, 3),
    )


def _cspnet():
    return _models().CSPNetBackbone(
        stem_filters=16,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 2, 2],
        stackwise_strides=[1, 2, 2],
        stackwise_num_filters=[16, 24, 32],
        block_type="dark_block",
        stage_type="csp",
        bottle_ratio=[0.5, 1.0, 1.0],
        block_ratio=[1.0, 0.5, 0.5],
        expand_ratio=[2.0, 1.0, 1.0],
        down_growth=True,
        image_shape=(SIZE, SIZE, 3),
    )


def _xception():
    return _models().XceptionBackbone(
        stackwise_conv_filters=[[8, 16], [16, 24], [24, 24, 24], [32, 32]],
        stackwise_pooling=[True, True, False, False],
        image_shape=(SIZE, SIZE, 3),
    )


def _hgnet(affine):
    return _models().HGNetV2Backbone(
        depths=[1, 2, 1],
        embedding_size=8,
        hidden_sizes=[16, 24, 32],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=affine,
        stackwise_stage_filters=[
            (8, 8, 16, 1, 2, 3),
            (16, 8, 24, 2, 2, 3),
            (24, 16, 32, 1, 2, 5),
        ],
        apply_downsample=[False, True, True],
        use_lightweight_conv_block=[False, False, True],
        image_shape=(SIZE, SIZE, 3),
    )


def _vgg():
    """keras-hub's VGG, which has no norms, with one after each convolution."""

    def with_norm(layer, *args, **kwargs):
        y = layer(*args, **kwargs)
        if isinstance(layer, layers.Conv2D):
            y = layers.BatchNormalization(name=f"{layer.name}_bn")(y)
        return y

    model = _models().VGGBackbone([1, 2, 2], [8, 16, 24], image_shape=(SIZE, SIZE, 3))
    plain = keras.Model(model.input, model.output)
    return keras.models.clone_model(plain, call_function=with_norm)


def _deeplab():
    return _models().DeepLabV3Backbone(
        image_encoder=_resnet("bottleneck_block"),
        spatial_pyramid_pooling_key="P5",
        upsampling_size=8,
        dilation_rates=[1, 2],
        low_level_feature_key="P2",
        projection_filters=8,
        image_shape=(SIZE, SIZE, 3),
    )


def _retinanet():
    return _models().RetinaNetBackbone(
        image_encoder=_resnet("basic_block"),
        min_level=3,
        max_level=7,
        use_p5=False,
        use_fpn_batch_norm=True,
        image_shape=(SIZE, SIZE, 3),
    )


NETWORKS = {
    "ResNet": lambda: _resnet("bottleneck_block"),
    "ResNetV2": lambda: _resnet("basic_block", use_pre_activation=True),
    "ResNet-vd": lambda: _resnet(
        "bottleneck_block_vd",
        input_conv_filters=[8, 8, 64],
        input_conv_kernel_sizes=[3, 3, 3],
    ),
    "DenseNet": _densenet,
    "MobileNetV3": _mobilenet,
    "EfficientNet": lambda: _efficientnet(["v1"] * 3),
    "EfficientNetV2": lambda: _efficientnet(["fused", "fused", "unfused"]),
    "CSPNet": _cspnet,
    "Xception": _xception,
    "HGNetV2": lambda: _hgnet(affine=False),
    "HGNetV2-affine": lambda: _hgnet(affine=True),
    "VGG-norms": _vgg,
    "DeepLabV3": _deeplab,
    "RetinaNet": _retinanet,
}

_NETWORKS = compare.define_names("networks", list(NETWORKS), NETWORKS)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def check(name, batch=8):
    """Everything for one network. Returns a dict."""
    keras.utils.set_random_seed(0)
    model = randomize(NETWORKS[name]())
    x = np.random.default_rng(1).normal(size=(batch, SIZE, SIZE, 3)).astype("float32")
    expected = outputs(model, x)
    row = {
        "BatchNormalization": count(model, layers.BatchNormalization),
        "spread": float(np.max(np.std(expected, 0)) / np.max(np.abs(expected))),
    }
    with warnings.catch_warnings(record=True, action="always") as said:
        start = time.process_time()
        new = convert(model, "cbn", data=x)
        row["seconds"] = time.process_time() - start
    row["warnings"] = [str(w.message) for w in said if "convert:" in str(w.message)]
    row["CBN"] = count(new, CBN)
    row["left"] = count(new, layers.BatchNormalization)
    row["preserve"] = difference(outputs(new, x), expected)
    targets = tree.map_structure(keras.ops.zeros_like, new(x, training=False))
    # On TensorFlow, making a graph of the step takes longer than running it twice.
    eagerly = keras.backend.backend() == "tensorflow"
    new.compile(keras.optimizers.SGD(1e-3, clipnorm=1.0), "mse", run_eagerly=eagerly)
    history = new.fit(
        x, targets, len(x), epochs=2, verbose=0, callbacks=[AMAT()], shuffle=False
    )
    row["losses"] = history.history["loss"]
    trained = outputs(new, x)
    loaded = reloaded(new)
    row["load"] = difference(outputs(loaded, x), trained)
    row["fold"], row["stay"] = _folded(model, x, expected)
    row["CBN fold"], row["CBN stay"] = _folded(loaded, x, trained)
    row["unchanged"] = difference(outputs(model, x), expected) == 0
    return row


def _folded(model, x, expected):
    """The difference after fold, and how many norms are left."""
    with warnings.catch_warnings(action="ignore"):
        result = fold(model)
    for layer in layers_of(result):
        package = type(layer).__module__.partition(".")[0]
        if package != "keras" and not layer.name.endswith("_lab"):
            raise AssertionError(f"layer '{layer.name}' of {package} is left")
    return difference(outputs(result, x), expected), count(
        result, layers.BatchNormalization
    )


def main(_):
    settings = {
        "benchmark": "hub",
        "image_size": SIZE,
        "preserve_limit": PRESERVE_LIMIT,
        "fold_limit": FOLD_LIMIT,
        "keras_hub": importlib.metadata.version("keras-hub"),
    }
    steps = (
        ({"network": name}, functools.partial(check, name)) for name in _NETWORKS.value
    )
    compare.report_steps(steps, settings, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
