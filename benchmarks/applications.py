"""convert, fold and recalibrate over the families of keras.applications.

    python -m benchmarks.applications                       # all families, 2 CPU cores
    python -m benchmarks.applications --models=ResNet50,VGG16

The smallest member of each family at the smallest input that it takes, without trained
weights; kernels, affine weights and moving statistics of every normalisation layer are
drawn at random, with scales of both signs. For each model:

* `convert(model, "cbn", data=...)` gives the same outputs; the model trains one step,
  is saved, and loads;
* the same for the other norms, where the outputs are preserved by all but WS and CWN;
* `fold` of the model, and of each converted and trained model, gives the same outputs;
  the model is also folded in float64, and its own rounding in float32 is measured
  against that.

A difference is max |a - b| / max |b|. Rows are written as they are done, to a JSON file
from which a second run goes on. --output writes the table.
"""

import gc
import importlib.metadata
import json
import pathlib
import tempfile
import time
import warnings

import keras
import numpy as np
from absl import app, flags
from keras import tree

from benchmarks import machine
from keras_norms import AMAT
from keras_norms.layers import CBN, layers_of
from keras_norms.surgery import convert, fold

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
# WS and CWN take the mean out of each unit's kernel.
NOT_PRESERVED = {"ws", "cwn"}
PRESERVE_LIMIT = 1e-4
FOLD_LIMIT = 1e-5

_MODELS = flags.DEFINE_list("models", list(MODELS), "Names in keras.applications.")
_NORMS = flags.DEFINE_list("norms", NORMS, "Names of norms.")
_BATCH = flags.DEFINE_integer("batch", 8, "Images.", lower_bound=2)
_STATE = flags.DEFINE_string(
    "state", "/tmp/keras_norms_applications.json", "File to go on from."
)
_AGAIN = flags.DEFINE_bool("again", False, "Whether to do models again that are done.")
_OUTPUT = flags.DEFINE_string("output", None, "Markdown file to write the table to.")


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


def randomize(model):
    """Draw all weights of a model anew, so that no layer is left unused."""
    rng = np.random.default_rng(0)
    for layer in layers_of(model):
        for weight in () if layers_of(layer, include_self=False) else layer.weights:
            value = draw(weight.name, tuple(weight.shape), rng)
            if value is not None:
                weight.assign(value)
        if hasattr(layer, "adapt_mean"):
            layer.adapt_mean.assign(np.full(layer.adapt_mean.shape, 0.5))
            layer.adapt_variance.assign(np.full(layer.adapt_variance.shape, 0.08))
            layer.finalize_state()
    return model


def draw(name, shape, rng):
    """A random value that keeps activations near the size of the layer's input."""
    if name in ("kernel", "pointwise_kernel"):
        # A depthwise kernel is (height, width, channels, 1): see below.
        fan_in = np.prod(shape[:-1]) if shape[-1] > 1 else np.prod(shape[:-2])
        return rng.normal(0, np.sqrt(1.5 / fan_in), shape)
    if name == "depthwise_kernel":
        return rng.normal(0, np.sqrt(1 / np.prod(shape[:-2])), shape)
    if name == "moving_variance":
        return rng.uniform(0.5, 2, shape)
    if name == "gamma":
        return rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)
    if name in ("moving_mean", "beta", "bias"):
        return rng.normal(0, 0.3, shape)
    return None


def difference(actual, expected):
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def outputs(model, x):
    """All outputs, one row for each image."""
    # Not compiled: that would take longer than to run it once.
    made = map(keras.ops.convert_to_numpy, tree.flatten(model(x, training=False)))
    return np.hstack([np.asarray(y, "float64").reshape(len(y), -1) for y in made])


def check(name, size, norms, batch):
    """Everything for one model. Returns a row."""
    start = time.perf_counter()
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 255, (batch, size, size, 3)).astype("float32")
    x = x / 127.5 - 1 if scaled(name) else x
    labels = rng.integers(0, 10, batch)
    model = build(name, size)
    expected = outputs(model, x)
    row = {
        "model": name,
        "input": size,
        "layers": len(layers_of(model)),
        "BatchNormalization": count(model, keras.layers.BatchNormalization),
        "norms": {},
    }
    # How much outputs depend on the image, of their size.
    row["spread"] = float(np.max(np.std(expected, 0)) / np.max(np.abs(expected)))
    row["fold"], row["stay"] = folded(model, x, expected)
    row["rounding"], row["fold64"] = in_float64(name, size, model, x, expected)
    for norm in norms:
        row["norms"][norm] = converted(model, norm, x, labels, expected)
        gc.collect()
        keras.utils.clear_session(free_memory=True)
    unchanged = difference(outputs(model, x), expected)
    row["unchanged"] = unchanged == 0
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def in_float64(name, size, model, x, expected):
    """Rounding of the model itself, and the difference after fold, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        double = build(name, size)
        double.set_weights(model.get_weights())
        x = x.astype("float64")
        exact = np.asarray(double(x, training=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = np.asarray(fold(double)(x, training=False))
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    return difference(expected, exact), difference(again, exact)


def scaled(name):
    """Whether the family scales its input outside of the model."""
    return not name.startswith(("Efficient", "MobileNetV3", "ConvNeXt"))


def count(model, cls):
    return len(layers_of(model, cls))


def folded(model, x, expected):
    """The difference after fold, and how many layers stay in place of norms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fold(model)
    norms = count(result, keras.layers.BatchNormalization)
    shifts = count(result, keras.layers.Rescaling) - count(
        model, keras.layers.Rescaling
    )
    left = {type(layer).__module__ for layer in layers_of(result)}
    if any(module.startswith("keras_norms") for module in left):
        raise AssertionError("a layer of keras_norms is left")
    return difference(outputs(result, x), expected), [norms, shifts]


def converted(model, norm, x, labels, expected):
    """One norm: outputs preserved, one step, saved and loaded, folded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = convert(model, norm, data=[x] if norm in ("cbn", "lp_norm") else None)
        result = {"preserve": difference(outputs(new, x), expected)}
        result["CBN"] = count(new, CBN)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # One step: making a graph takes longer than to run it.
        optimizer = keras.optimizers.SGD(1e-3, clipnorm=1.0)
        new.compile(optimizer, loss, run_eagerly=True)
        callbacks = [AMAT()] if norm == "cbn" else None
        history = new.fit(
            x, labels, len(x), verbose=0, callbacks=callbacks, shuffle=False
        )
        result["loss"] = history.history["loss"][0]
        trained = outputs(new, x)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "model.keras"
            new.save(file)
            loaded = keras.models.load_model(file)
        result["load"] = difference(outputs(loaded, x), trained)
        result["fold"], result["stay"] = folded(loaded, x, trained)
    return result


def cell(value, limit):
    text = f"{value:.1e}"
    return text if value <= limit else f"**{text}**"


def table(rows):
    preserved = [norm for norm in NORMS if norm not in NOT_PRESERVED]
    lines = [
        "| model | input | BN layers | CBN layers | spread | "
        + " | ".join(f"{norm}: preserved" for norm in preserved)
        + " | own rounding | fold in float64 | fold of the original | "
        + " | ".join(f"{norm}: fold" for norm in NORMS)
        + " | stay, original (norms, shifts) | stay, CBN (norms, shifts) | seconds |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row in rows:
        norms = row["norms"]
        if set(norms) != set(NORMS):
            continue
        cells = [row["model"], row["input"], row["BatchNormalization"]]
        cells += [norms["cbn"]["CBN"], f"{row['spread']:.1e}"]
        cells += [cell(norms[n]["preserve"], PRESERVE_LIMIT) for n in preserved]
        cells += [f"{row['rounding']:.1e}", f"{row['fold64']:.1e}"]
        cells += [cell(row["fold"], FOLD_LIMIT)]
        cells += [cell(norms[n]["fold"], FOLD_LIMIT) for n in NORMS]
        cells += [f"{a}, {b}" for a, b in (row["stay"], norms["cbn"]["stay"])]
        cells += [round(row["seconds"])]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def document(rows):
    about = machine.describe()
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}"
        for package in ("keras", "tensorflow", "numpy")
    )
    return f"""# convert and fold over keras.applications

    python -m benchmarks.applications --output=docs/results/applications.md

{about["backend"]} on {about["cores"]} CPU cores ({about["processor"]}), {versions},
float32, {_BATCH.value} random images. The smallest member of each family at the
smallest input it takes, with random kernels, affine weights (scales of both signs) and
moving statistics. What is compared, and how, is in `benchmarks/applications.py`.

A number is max |a - b| / max |b| over all outputs. *Spread* is how much the outputs
vary between images, on the same scale. *Preserved* is the converted model
against the original (limit {PRESERVE_LIMIT:g}); *fold* is the folded model against what
was folded (limit {FOLD_LIMIT:g}), for the converted models after one training step, a
save and a load. A number over its limit is bold. *Own rounding* is the original in
float32 against itself in float64: no rearrangement of the arithmetic can be expected to
stay below it. *Fold in float64* shows that the folded map is the same one. WS and CWN
take the mean out of each unit's kernel, so they do not preserve outputs. WS without a
gain also makes activations grow from layer to layer, by many orders of magnitude where
no normalisation follows. *Stay* counts the layers that take the place of a
normalisation which no kernel can take: a frozen BatchNormalization, or a shift before
zero padding.

{table(rows)}
"""


def main(_):
    state = pathlib.Path(_STATE.value)
    rows = json.loads(state.read_text()) if state.exists() else {}
    for name in _MODELS.value:
        old = {} if _AGAIN.value else rows.get(name, {})
        norms = [norm for norm in _NORMS.value if norm not in old.get("norms", {})]
        if not norms:
            continue
        row = check(name, MODELS[name], norms, _BATCH.value)
        row["norms"] = {**old.get("norms", {}), **row["norms"]}
        row["seconds"] += old.get("seconds", 0)
        rows[name] = row
        state.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(row), flush=True)
        keras.utils.clear_session(free_memory=True)
    rows = [rows[name] for name in MODELS if name in rows]
    print(table(rows))
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(document(rows))


if __name__ == "__main__":
    app.run(main)
