"""What int8 and int4 cost networks with each normalisation.

    KERAS_BACKEND=torch python -m benchmarks.quantization      # a minute on 2 CPU cores

Trains three Dense layers on scikit-learn's 8x8 digits, then calls `model.quantize`. A
cell gives the change of the network's outputs (logits of the test images) in units of
their standard deviation, root mean square / largest, and the test accuracy before and
after. Mean over the seeds.
"""

import warnings

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare, tables
from keras_norms import AMAT, CBN, FusedCBN
from recipes.engine import data

NORMS = ["none", "bn", "cbn", "fused_cbn"]
WIDTH = 128

_NORMS = compare.define_names("norms", NORMS, NORMS)
_SEEDS = flags.DEFINE_integer("seeds", 3, "How many trainings.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs of each training.", lower_bound=1)


def network(norm):
    """Two hidden layers with ReLU and the norm at its usual place, 10 logits."""
    model = keras.Sequential([keras.layers.Flatten()])
    for layer in range(3):
        dense = keras.layers.Dense(WIDTH if layer < 2 else 10)
        if norm == "fused_cbn" and layer:
            dense = FusedCBN(dense, CBN(rho=2))
        elif norm == "cbn" and layer:
            model.add(CBN(rho=2))
        model.add(dense)
        if layer < 2:
            if norm == "bn":
                model.add(keras.layers.BatchNormalization())
            model.add(keras.layers.Activation("relu"))
    return model


def change(norm, mode, seed):
    """Root mean square and largest change of outputs, accuracy before and after."""
    images = data.load("digits")
    keras.utils.set_random_seed(seed)
    model = network(norm)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    callbacks = [AMAT()] if "cbn" in norm else []
    x, y = images.x_train, images.y_train
    model.fit(x, y, 64, _EPOCHS.value, verbose=0, callbacks=callbacks)
    before = model.predict(images.x_test, verbose=0)
    # Layers without kernels are not quantized.
    with warnings.catch_warnings(action="ignore"):
        model.quantize(mode)
    after = model.predict(images.x_test, verbose=0)
    moved = (after - before) / before.std()
    accuracy = [
        100 * np.mean(logits.argmax(-1) == images.y_test) for logits in (before, after)
    ]
    return np.sqrt(np.mean(moved**2)), np.abs(moved).max(), *accuracy


def main(_):
    rows = []
    for norm in _NORMS.value:
        row = [norm]
        for mode in ("int8", "int4"):
            each = [change(norm, mode, seed) for seed in range(_SEEDS.value)]
            rms, largest, before, after = np.mean(each, 0)
            row += [f"{rms:.1%} / {largest:.0%}", f"{before:.1f} % -> {after:.1f} %"]
        rows.append(row)
    print(tables.markdown(["norm", "int8", "accuracy", "int4", "accuracy"], rows))


if __name__ == "__main__":
    app.run(main)
