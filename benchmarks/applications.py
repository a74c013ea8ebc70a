"""convert and fold over the families of keras.applications.

    KERAS_BACKEND=torch python -m benchmarks.applications  # the fastest, without NASNet
    python -m benchmarks.applications --models=NASNetMobile

The smallest member of each family at the smallest input that it takes, without trained
weights; kernels, affine weights and moving statistics of every normalisation layer are
drawn at random, with scales of both signs. For each model:

* `convert(model, "cbn", data=...)` gives the same outputs; the model trains one step,
  is saved, and loads;
* the same for the other norms, all of which preserve the outputs except WS and CWN;
* `fold` of the model, and of each converted and trained model, gives the same outputs.

A difference is max |a - b| / max |b|. To judge it, compare the model's own rounding,
the difference between the model in float32 and in float64: no other order of the
arithmetic can be expected to stay below that. Prints a table; --output also writes it
as JSON, and the same command continues with what is missing there.
"""

import functools
import gc
import warnings

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare
from benchmarks.outputs import count, difference, outputs, randomize, reloaded
from keras_norms import AMAT
from keras_norms.layers import CBN, layers_of
from keras_norms.surgery import convert, fold
from recipes.engine.precision import precision

# The smallest member of a family, and the smallest input it takes.
MODELS = {
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "DenseNet121": 32,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionV3": 75,
    "InceptionResNetV2": 75,
    "Xception": 71,
    "NASNetMobile": 32,
    "ConvNeXtTiny": 32,
}
NORMS = ["cbn", "noisy_bn", "lp_norm", "ws", "cwn", "wn"]
PRESERVE_LIMIT = 1e-4
FOLD_LIMIT = 1e-5

if keras.backend.backend() == "torch":
    del MODELS["NASNetMobile"]  # Keras does not build it there

_MODELS = compare.define_names("models", list(MODELS), MODELS)
_BATCH = flags.DEFINE_integer("batch", 8, "Images in a batch.", lower_bound=2)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")


def build(name, size):
    """A model of the family with random weights that no layer leaves unused."""
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(
        weights=None,
        input_shape=(size, size, 3),
        classes=10,
        classifier_activation=None,
    )
    return randomize(model)


def check(name, batch):
    """Everything for one model. Returns a dict."""
    rng, size = np.random.default_rng(1), MODELS[name]
    x = rng.uniform(0, 255, (batch, size, size, 3)).astype("float32")
    x = x / 127.5 - 1 if scaled(name) else x
    labels = rng.integers(0, 10, batch)
    model = build(name, size)
    expected = outputs(model, x)
    found = {
        "BatchNormalization": count(model, keras.layers.BatchNormalization),
        # How much outputs depend on the image, relative to their size.
        "spread": float(np.max(np.std(expected, 0)) / np.max(np.abs(expected))),
        "rounding": difference(expected, in_float64(name, model, x)),
        "norms": {},
    }
    found["fold"], found["stay"] = folded(model, x, expected)
    for norm in NORMS:
        found["norms"][norm] = converted(model, norm, x, labels, expected)
        gc.collect()
        keras.utils.clear_session(free_memory=True)
    found["unchanged"] = difference(outputs(model, x), expected) == 0
    return found


def in_float64(name, model, x):
    """The outputs of the same model in float64."""
    with precision("float64"):
        double = build(name, MODELS[name])
        double.set_weights(model.get_weights())
        return outputs(double, x.astype("float64"))


def scaled(name):
    """Whether the family scales its input outside the model."""
    return not name.startswith(("Efficient", "MobileNetV3", "ConvNeXt"))


def folded(model, x, expected):
    """The difference after fold, and how many layers it leaves in place of norms."""
    with warnings.catch_warnings(action="ignore"):
        result = fold(model)
    norms = count(result, keras.layers.BatchNormalization)
    rescaling = keras.layers.Rescaling
    shifts = count(result, rescaling) - count(model, rescaling)
    left = {type(layer).__module__ for layer in layers_of(result)}
    if any(module.startswith("keras_norms") for module in left):
        raise AssertionError("a layer of keras_norms is left")
    return difference(outputs(result, x), expected), [norms, shifts]


def converted(model, norm, x, labels, expected):
    """One norm: outputs preserved, one step, saved and loaded, folded."""
    with warnings.catch_warnings(action="ignore"):
        new = convert(model, norm, data=[x] if norm in ("cbn", "lp_norm") else None)
        result = {"preserve": difference(outputs(new, x), expected)}
        result["CBN"] = count(new, CBN)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # One step: making a graph takes longer than running it.
        optimizer = keras.optimizers.SGD(1e-3, clipnorm=1.0)
        new.compile(optimizer, loss, run_eagerly=True)
        callbacks = [AMAT()] if norm == "cbn" else None
        history = new.fit(
            x, labels, len(x), verbose=0, callbacks=callbacks, shuffle=False
        )
        result["loss"] = history.history["loss"][0]
        trained = outputs(new, x)
        loaded = reloaded(new)
        result["load"] = difference(outputs(loaded, x), trained)
        result["fold"], result["stay"] = folded(loaded, x, trained)
    return result


def main(_):
    settings = {
        "benchmark": "applications",
        "batch": _BATCH.value,
        "preserve_limit": PRESERVE_LIMIT,
        "fold_limit": FOLD_LIMIT,
    }
    steps = (
        (
            {"model": name, "input": MODELS[name]},
            functools.partial(check, name, _BATCH.value),
        )
        for name in _MODELS.value
    )
    compare.report_steps(steps, settings, _OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
