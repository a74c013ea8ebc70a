"""What formats for deployment cost a folded network, in size, accuracy and time.

    python -m benchmarks.deployment              # 10 minutes of a CPU core, TensorFlow

Needs `pip install '.[tensorflow,recipes,deploy]'`. Trains each network with
BatchNormalization and with CBN on images of 32x32, folds it, exports it for one image
at a time, and runs the test images through the exported file. `cbn_pruned` is the
network with CBN without the channels that are constant on the calibration images; it is
left out if there are none. Errors are those of logits against the trained float32
network, in standard deviations of its logits. *Same class* is the share of test images
with the class that this network gives. *Time* is processor time for one image on one
thread, relative to the folded SavedModel; the formats take turns, and the number is the
median of the ratios, with quartiles.

The 200 calibration images, from which int8 takes the ranges of activations, are
training images. Keras' int8 applies to Dense layers only: convolutions stay as they
are.
"""

import functools
import pathlib
import tempfile
import time
import warnings

import keras
import numpy as np
from absl import app, flags, logging

from benchmarks import compare, runtimes
from keras_norms import AMAT, CBN, convert, fold, prune, recalibrate
from recipes import models
from recipes.engine import data

_NETWORKS = flags.DEFINE_list("networks", ["resnet20", "mobilenetv2"], "Networks.")
_NORMS = compare.define_names(
    "norms", ["bn", "cbn", "cbn_pruned"], ["bn", "bn_pruned", "cbn", "cbn_pruned"]
)
_DATASET = flags.DEFINE_string("dataset", "digits", "Data set, as in the recipes.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of tensorflow_datasets.")
_TRAIN_SIZE = flags.DEFINE_integer(
    "train_size", None, "Training images; all if not given."
)
_TEST_SIZE = flags.DEFINE_integer(
    "test_size", 1000, "Test images at most.", lower_bound=2
)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs of each training.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 100, "Rounds to time.", lower_bound=4)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

CALIBRATION = 200  # images
APPLICATION = "mobilenetv2"  # the network that is not of `recipes`
YARDSTICK = "SavedModel"


@flags.validator("networks")
def can_be_built(networks):
    """Report names that `build` does not know as an error."""
    try:
        for network in {*networks} - {APPLICATION}:
            models.check(network, "relu")
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


def data_set():
    """The images, 32x32 or larger."""
    images = data.load(_DATASET.value, _DATA_DIR.value, _TRAIN_SIZE.value)
    return data.enlarged(images)


def build(network, norm, shape, classes):
    """A network of `recipes.models`, or MobileNetV2, that returns logits."""
    if network != APPLICATION:
        return models.build(network, shape, classes, norm, "relu", rho=2)
    model = keras.applications.MobileNetV2(
        input_shape=shape, weights=None, classes=classes, classifier_activation=None
    )
    return model if norm == "bn" else convert(model, CBN(rho=2), preserve=False)


@functools.lru_cache(maxsize=1)  # the same network is pruned next
def trained(network, norm):
    """The trained network, with statistics measured on the training images."""
    images = data_set()
    keras.utils.set_random_seed(0)
    model = build(network, norm, images.x_train.shape[1:], images.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    callbacks = [AMAT()] if norm == "cbn" else []
    x, y = images.x_train, images.y_train
    model.fit(x, y, 64, _EPOCHS.value, verbose=0, callbacks=callbacks)
    return recalibrate(model, x, verbose=0)


def deployed(model, x_train, folder):
    """Yields format, path of the file and function from one image to logits."""
    spec = [keras.InputSpec(shape=(1, *x_train.shape[1:]), dtype="float32", name="x")]
    calibration = x_train[:CALIBRATION]
    folded = fold(model)

    def export(name, model=folded, **kwargs):
        path = folder / name
        model.export(str(path), verbose=False, input_signature=spec, **kwargs)
        return path

    path = export("norms", model)
    yield "SavedModel, not folded", path, runtimes.saved_model(path)
    path = export("folded")
    yield YARDSTICK, path, runtimes.saved_model(path)
    quantized = keras.models.clone_model(folded)
    quantized.set_weights(folded.get_weights())
    quantized.quantize("int8")
    path = export("int8", quantized)
    yield "SavedModel, Keras int8", path, runtimes.saved_model(path)
    path = export("float.tflite", format="litert")
    yield "LiteRT", path, runtimes.litert(path)
    path = export("int8.tflite", format="litert", **runtimes.litert_int8(calibration))
    yield "LiteRT int8", path, runtimes.litert(path)
    path = export("float.onnx", format="onnx")
    yield "ONNX Runtime", path, runtimes.onnx(path)
    path = runtimes.onnx_int8(path, calibration)
    yield "ONNX Runtime int8", path, runtimes.onnx(path)
    yield "OpenVINO, ONNX int8", path, runtimes.openvino(path)
    path = export("float.xml", format="openvino")
    yield "OpenVINO", path, runtimes.openvino(path)


def processor_time(run, image):
    """Processor seconds, without those in which the machine did something else."""
    start = time.process_time()
    run(image)
    return time.process_time() - start


def size(path):
    """Bytes of a file, or of all files in a folder, with the weights beside an .xml."""
    files = path.rglob("*") if path.is_dir() else [path, path.with_suffix(".bin")]
    return sum(file.stat().st_size for file in files if file.is_file())


def measure(network, norm):
    """One network with one norm in every format. Returns a list of rows."""
    images = data_set()
    model = trained(network, norm.removesuffix("_pruned"))
    x, y = images.x_test[: _TEST_SIZE.value], images.y_test[: _TEST_SIZE.value]
    expected = model.predict(x, verbose=0)
    if norm.endswith("_pruned"):
        pruned = prune(model, images.x_train[:CALIBRATION])
        if pruned.channels[0] == pruned.channels[1]:
            return []  # the same network
        model = pruned.model
    rows, timers = [], {}
    quiet = warnings.catch_warnings(action="ignore")  # of shifts and int8
    with tempfile.TemporaryDirectory() as folder, quiet:
        formats = deployed(model, images.x_train, pathlib.Path(folder))
        for name, path, run in formats:
            logits = np.concatenate([run(image[None]) for image in x])
            error = (logits - expected) / expected.std()
            timers[name] = functools.partial(processor_time, run, x[:1])
            rows.append(
                {
                    "network": network,
                    "norm": norm,
                    "format": name,
                    "bytes": size(path),
                    "error": float(np.sqrt(np.mean(error**2))),
                    "largest_error": float(np.abs(error).max()),
                    "same_class": np.mean(logits.argmax(-1) == expected.argmax(-1)),
                    "accuracy": np.mean(logits.argmax(-1) == y),
                }
            )
        times = compare.take_turns(timers, _ROUNDS.value)
    for row in rows:
        row["milliseconds"] = 1e3 * float(np.median(times[row["format"]]))
        row |= compare.ratio(times[row["format"]], times[YARDSTICK])
    return rows


def main(_):
    if keras.backend.backend() != "tensorflow":
        raise app.UsageError("Only TensorFlow exports to all of these formats.")
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    logging.set_verbosity(logging.ERROR)
    rows = []
    for network in _NETWORKS.value:
        for norm in _NORMS.value:
            rows += measure(network, norm)
            keras.utils.clear_session(free_memory=True)
    compare.report(_OUTPUT.value, "deployment", rows, rounds=_ROUNDS.value)


if __name__ == "__main__":
    app.run(main)
