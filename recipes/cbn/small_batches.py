r"""Small batches: CBN with moving averages, CBN and BN with batch statistics, others.

The small run, and the run on 10,000 images of CIFAR-10, for a GPU. The latter trains
the seeds of a combination together, in one program:

    python -m recipes.cbn.small_batches
    KERAS_BACKEND=jax python -m recipes.cbn.small_batches --dataset=cifar10 \
        --data_dir=<where it is> --train_size=10000 --epochs=20 \
        --batch_sizes=2,4,8,32,128 --seeds=5 --population=5

The smaller the learning rate, the more batches AMAT's moving averages cover (Eqs. 8 and
9). Here the rate is proportional to the batch size, and CBN therefore normalises with
about the same number of images at every batch size: 128 at the default rate, more when
the rate falls. BN and CBN without AMAT normalise with the images of one batch. For
inference, these two average about ten batches (momentum 0.9) and batch renormalization
a hundred. Its first steps normalise little: Keras has no warm-up of its bounds.

The paper has no such experiment. Test accuracy in %, mean and deviation of three seeds,
400 digits (60 trainings, 454 seconds of processor time). With sigmoid CBN is ahead,
both with and without AMAT; with ReLU it loses to BN at two images per batch:

                                relu                    sigmoid
    batch size               2           32             2           32
    BN              94.8 ± 0.8   93.3 ± 0.7    84.1 ± 4.8   89.7 ± 0.3
    CBN             91.0 ± 0.3   94.9 ± 0.9    93.3 ± 0.3   94.4 ± 1.5
    without AMAT    91.9 ± 1.2   94.4 ± 0.6    93.9 ± 1.0   94.1 ± 0.8
    GN              94.4 ± 0.6   92.8 ± 0.6    16.0 ± 9.9   10.2 ± 0.2
    batch renorm    93.1 ± 1.6   92.8 ± 2.0    85.2 ± 1.2   15.6 ± 9.5

At two images per batch, training accuracy with ReLU and sigmoid is 100.0 and 100.0 %
for CBN, 87.9 and 89.4 % without AMAT, and 97.6 and 69.9 % for BN. CBN has the least
noise in training, which does not make it the best on other images. After so few steps,
at most 1,600, GN and batch renormalization have not yet learned with sigmoid.

On 10,000 images of CIFAR-10 with ReLU, CBN is ahead of BN at every batch size (59.0 and
58.3 % at 4 images, 50.5 and 49.1 at 2, on a GPU). At 2, on a CPU, batch renorm has 53.5
%, GN 52.0, CBN 51.9, and CBN without AMAT 44.5. With sigmoid, at 4 and 2 images, BN has
41.6 and 37.4 %, CBN 48.0 and 42.5, and CBN without AMAT 51.6 and 43.6. See
docs/results/small_batches.md.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import itertools

from recipes.engine import classifier, command, figures, joint_training, results
from recipes.engine.settings import setting

USUAL_BATCH = 128  # the learning rate is for this size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Populations):
    """Every norm with every batch size and activation."""

    model: str = "resnet8"
    norms: tuple[str, ...] = ("bn", "cbn", "cbn_batch", "group", "renorm")
    activations: tuple[str, ...] = ("relu", "sigmoid")
    batch_sizes: tuple[int, ...] = (2, 32)
    learning_rate: float = setting(
        0.1,
        f"Learning rate at {USUAL_BATCH} images in a batch; else in proportion.",
        above=0,
    )
    train_size: int | None = 400
    epochs: int | None = 8


def run(settings):
    """Trains everything; returns the directory with the table and the figure."""
    runs = []
    for size in settings.batch_sizes:
        rate = settings.learning_rate * size / USUAL_BATCH
        runs += settings.runs(batch_size=size, learning_rate=rate)
    outcomes = joint_training.train_all(settings, runs, classifier.train)
    rows, accuracies = [], {}
    swept = settings.activations, settings.norms, settings.batch_sizes
    for activation, norm, size in itertools.product(*swept):
        cell = {"activation": activation, "norm": norm, "batch_size": size}
        found = outcomes.of(**cell)
        row = {"accuracy": results.percent(found)}
        rows.append(cell | row | {"runs": [each.results for each in found]})
        by_size = accuracies.setdefault(activation, {}).setdefault(norm, {})
        by_size[size] = results.accuracies(found)
    directory = settings.directory("cbn_small_batches")
    results.write(directory, table(rows, settings), {"rows": rows})
    path, labels = directory / "accuracy.png", ("batch size", "test accuracy (%)")
    figures.against(path, accuracies, *labels, settings.about(), base=2)
    return directory


def table(rows, settings):
    """The rows as Markdown: a table for each activation, a line for each norm."""
    text = "Test accuracy after the last epoch, %, against the batch size\n\n"
    for activation in settings.activations:
        of = [row for row in rows if row["activation"] == activation]
        lines = [
            [figures.name_of(norm), *(row["accuracy"] for row in cells)]
            for norm, cells in itertools.groupby(of, key=lambda row: row["norm"])
        ]
        text += results.markdown([activation, *settings.batch_sizes], lines) + "\n"
    return (
        f"{text}The learning rate is {settings.learning_rate:g} with {USUAL_BATCH} "
        f"images a batch, else in proportion. {results.note(settings.seeds)}\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
