"""What `group_size` of CBN does to the accuracy of a network.

    KERAS_BACKEND=torch python -m benchmarks.groups            # minutes on 2 CPU cores

Trains three hidden layers of 64 units, each with ReLU and CBN, on 1,024 of
scikit-learn's 8x8 digits, all in one batch, for 60 steps. Prints the test accuracy,
mean and standard deviation over the seeds.
"""

import keras
import numpy as np
from absl import app, flags

from benchmarks import compare
from keras_norms import AMAT, CBN
from recipes.engine import data

_GROUP_SIZES = flags.DEFINE_list(
    "group_sizes", [0, 512, 128, 32, 16], "Sizes of groups; 0 is without."
)
flags.register_validator(
    "group_sizes",
    lambda given: all(str(size).isdigit() for size in given),
    "must be integers",
)
_SEEDS = flags.DEFINE_integer("seeds", 10, "How many trainings.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of each training.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.")

BATCH = 1024


def accuracy(group_size, seed):
    """The accuracy on the test images, in percent."""
    images = data.load("digits")
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Flatten()])
    for _ in range(3):
        model.add(keras.layers.Dense(64, "relu"))
        model.add(CBN(group_size=group_size or None))
    model.add(keras.layers.Dense(10))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = images.x_train[:BATCH], images.y_train[:BATCH]
    model.fit(x, y, BATCH, _STEPS.value, verbose=0, callbacks=[AMAT()])
    return 100 * model.evaluate(images.x_test, images.y_test, verbose=0)[1]


def main(_):
    rows = []
    for size in map(int, _GROUP_SIZES.value):
        found = [accuracy(size, seed) for seed in range(_SEEDS.value)]
        mean, deviation = float(np.mean(found)), float(np.std(found, ddof=1))
        rows.append({"group_size": size, "mean": mean, "deviation": deviation})
    compare.report(
        _OUTPUT.value, "groups", rows, seeds=_SEEDS.value, steps=_STEPS.value
    )


if __name__ == "__main__":
    app.run(main)
