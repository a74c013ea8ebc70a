"""Small trained models of every layer, in files that every later version must load.

    KERAS_BACKEND=tensorflow python -m tests.programs.golden

and the same with jax and torch write `saved_models/golden/<version>-<backend>/`: a
model `<name>.keras` and `<name>.npz` with inputs, the model's outputs at inference, and
those in training mode where these are not random. Files that are there stay as they
are: a golden file is written once.
"""

import pathlib

import keras
import numpy as np
from keras import layers

import keras_norms
from keras_norms import AMAT, CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN, activations
from keras_norms.layers.channel_affine import ChannelAffine
from keras_norms.layers.frozen import FROZEN

DIRECTORY = pathlib.Path(__file__).parents[2] / "saved_models" / "golden"
RANDOM = ("noisy_bn",)  # in training mode


def conv(**arguments):
    return layers.Conv2D(4, 3, padding="same", **arguments)


def wrapped(wrapper, **arguments):
    both = conv(), layers.DepthwiseConv2D(3, depth_multiplier=2)
    return [wrapper(layer, **arguments) for layer in both]


MODELS = {
    "cbn": lambda: [CBN(rho=2.0, omega=3.0), conv()],
    "cbn_coupled": lambda: [CBN(decouple=False, mean_gradient="ratio"), conv()],
    "cbn_plain": lambda: [CBN(center=False, scale=False), conv()],
    "channel_affine": lambda: [
        ChannelAffine("abcd,d->abcd", output_shape=(6, 6, 3), bias_axes="d")
    ],
    "frozen": lambda: [
        layer for cls in FROZEN.values() for layer in (conv(use_bias=False), cls())
    ],
    "fused_cbn": lambda: [FusedCBN(conv())],
    "noisy_bn": lambda: [conv(use_bias=False), NoisyBN(seed=1)],
    "lp_norm_1": lambda: [conv(use_bias=False), LpNorm(p=1)],
    "lp_norm_3_centered": lambda: [
        conv(use_bias=False),
        LpNorm(p=3, norm_of="centered"),
    ],
    "lp_norm_inf": lambda: [conv(use_bias=False), LpNorm(p=float("inf"))],
    "relu": lambda: [conv(activation=activations.relu), CBN()],
    "relu6": lambda: [conv(activation=activations.relu6), CBN()],
    "ws": lambda: wrapped(WS, gain=True),
    "cwn": lambda: wrapped(CWN, scale=2.0, gain=True),
    "wn": lambda: wrapped(WN),
}


def build(name):
    """Builds and trains a model for a few steps, so that no weight is as it began."""
    keras.utils.set_random_seed(0)
    after = layers.Activation("tanh"), layers.GlobalAveragePooling2D(), layers.Dense(3)
    model = keras.Sequential([keras.Input((6, 6, 3)), *MODELS[name](), *after])
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, (32, 6, 6, 3)).astype("float32")
    y = rng.integers(0, 3, 32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9), loss)
    callbacks = [AMAT()] if "cbn" in name or "relu" in name else []
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    # Without the optimizer: that of PyTorch loads where PyTorch is only.
    return keras.Model(model.inputs, model.outputs, name=name)


def outputs(model, x):
    """Outputs at inference, and in training mode, where these are not random."""
    found = {"inference": keras.ops.convert_to_numpy(model(x, training=False))}
    if model.name not in RANDOM:
        for layer in model._flatten_layers():
            if isinstance(layer, CBN):
                layer.set_learning_rate(0.5)
        found["training"] = keras.ops.convert_to_numpy(model(x, training=True))
    return found


def main():
    version = f"{keras_norms.__version__}-{keras.backend.backend()}"
    directory = DIRECTORY / version
    directory.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(1).normal(size=(8, 6, 6, 3)).astype("float32")
    for name in MODELS:
        path = directory / f"{name}.keras"
        if not path.exists():
            build(name).save(path)
            model = keras.models.load_model(path)
            np.savez(path.with_suffix(".npz"), x=x, **outputs(model, x))


if __name__ == "__main__":
    main()
