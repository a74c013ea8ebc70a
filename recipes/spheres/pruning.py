"""Channels of a trained network that can go: small gamma, and values that agree.

The small run, on scikit-learn's 8x8 digits, and that of the table below:

    python -m recipes.spheres.pruning
    python -m recipes.spheres.pruning --dataset=cifar10 --data_dir=<where it is> \
        --epochs=6 --until=4 --measure_size=128 --statistics_size=512 \
        --test_size=1000 --levels=0.1,0.15,0.2,0.225,0.25,0.275,0.3,0.35 \
        --shares=0.05,0.1,0.15,0.2,0.3,0.5

Claim (Sun et al., Section 2.2, left there as future work): not only units with a small
gamma can be removed (Liu et al.), but also units with similar gamma and beta, for they
have similar outputs and thus similar functions. Three ways to remove channels of one
trained network, each at growing tolerance:

* smallest gamma: channels of the smallest |gamma| in all layers, with their beta, as
  Liu et al. do. Only channels that one layer makes, as there: not those of sums.
* small gamma, mean kept: `prune(model, data, gamma=t, similarity=None)`
* and merging: `prune(model, data, gamma=t)`, where what another channel cannot say
  deviates by t at most.

For each: the share of all channels that is gone, test accuracy as it is and after
`recalibrate` on training images, and what is left of weights and
multiply-accumulates. Nothing is trained after pruning. `--gamma_l1` trains with the
penalty on gamma of Liu et al. And the premise: how much a unit's outputs correlate with
those of the unit whose gamma and beta are nearest, beside the mean over all units of
the layer, and the most.

With ResNet-20 after 4 epochs of CIFAR-10 (75.0 %), one point of accuracy is lost where
this share of channels and of multiply-accumulates is gone:

                               as pruned      recalibrated
    smallest gamma             0.8,  2.0 %    4.3, 10.5 %
    small gamma, mean kept     1.9,  6.5 %    6.2, 18.3 %
    and merging                4.0, 11.6 %    5.7, 15.3 %

So merging brings something where statistics are not recalibrated, but not for the
reason given: units correlate with those of the nearest gamma and beta by 0.203, and
with any other by 0.212. On digits (98.3 %) nothing is left of the gain after
recalibration: 7.6, 3.6 and 6.8 % of the channels. The run took 20 minutes of two
cores, the small one 3 of one, on an Intel Xeon that other work shared (TensorFlow). All
of it, another run, and what it means for speed, is in
docs/results/pruning.md.

Reference: Sun, Cao, Liang, Huang, Chen and Li, New Interpretations of Normalization
Methods in Deep Learning, AAAI 2020, Section 2.2. https://arxiv.org/abs/2006.09104.
Liu et al., Learning Efficient Convolutional Networks through Network Slimming,
ICCV 2017. https://arxiv.org/abs/1708.06519
"""

import dataclasses
import functools
import time

import keras
import numpy as np
from keras import ops

from keras_norms import prune, recalibrate
from recipes.engine import classifier, command, data, files, training
from recipes.engine.run import Run
from recipes.engine.settings import setting
from recipes.spheres import _pruning_results as results
from recipes.spheres._pruning_results import METHODS
from recipes.spheres._slimming import (
    SlimmingSGD,
    compiled,
    copy,
    own_norms,
    without_smallest,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slimmed(classifier.Saved):
    """A training whose last network is saved."""

    norm: str = "bn"
    activation: str = "relu"
    gamma_l1: float = setting(0.0, "Penalty on |gamma| in training.", at_least=0)
    until: int | None = setting(
        None, "Stop training after this epoch of these.", at_least=1
    )
    saved_models_dir: str = setting(
        "saved_models", "Where models are saved.", compare=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Slimmed):
    """One network, pruned in all ways."""

    measure_size: int = setting(512, "Training images that are measured.", at_least=1)
    statistics_size: int = setting(
        1024, "Training images that are recalibrated on.", at_least=1
    )
    test_size: int | None = setting(None, "All; the first ones.", at_least=1)
    levels: tuple[float, ...] = setting(
        (0.3, 0.4, 0.5, 0.6, 0.7), "Tolerances of prune.", at_least=0, at_most=1
    )
    shares: tuple[float, ...] = setting(
        (0.05, 0.1, 0.15, 0.2, 0.3, 0.5),
        "Shares of the smallest gamma.",
        at_least=0,
        at_most=1,
    )
    name: str | None = setting(None, "Of the run.", compare=False)

    def training(self):
        """The settings of the training alone."""
        names = [field.name for field in dataclasses.fields(Slimmed)]
        return Slimmed(**{name: getattr(self, name) for name in names})


def problem(settings):
    """The training of a classifier by `SlimmingSGD`, as long as `until` says."""
    optimizer = functools.partial(SlimmingSGD, gamma_l1=settings.gamma_l1)
    found = classifier.problem(settings, optimizer=optimizer)
    epochs = min(settings.until or settings.epochs, settings.epochs)
    return found._replace(epochs=epochs)


def trained(settings):
    """Trains a network, or loads what came out before, compiled for evaluation."""
    outcome = training.train(settings, "pruning_train", problem, at_end=classifier.save)
    if outcome.results["diverged"]:
        raise ValueError(
            f"The training in {settings.runs_dir}/{outcome.results['name']} diverged."
        )
    path = outcome.results["saved_model"]
    try:
        return compiled(keras.saving.load_model(path))
    except Exception as error:  # of the many kinds of zipfile, Keras and h5py
        raise files.damaged(path, f"it cannot be loaded ({error})") from None


def run(settings):
    """Trains a network and prunes it in all ways; goes on with what is not done.

    Returns:
        The path of the directory with table.md, results.json and pruning.png.
    """
    name = settings.name or f"pruning-{settings.label()}"
    recorded = Run(f"{settings.runs_dir}/{name}", settings.config())
    if recorded.results is None:
        data.images(settings)  # that they can be read
        with recorded:
            if recorded.results is None:
                measure(recorded, settings)
    return recorded.directory


def measure(recorded, settings):
    """Measures what is not measured yet; writes the table, the figure, the results."""
    model = trained(settings.training())
    loaded = data.images(settings)
    images = loaded.x_train[: settings.measure_size].copy()
    more = loaded.x_train[: settings.statistics_size].copy()
    test = tuple(
        array[: settings.test_size].copy() for array in (loaded.x_test, loaded.y_test)
    )
    del loaded
    data.load.cache_clear()  # all other images
    recorded.keep(len(recorded.metrics))
    done = {(line["method"], line["level"]) for line in recorded.metrics}
    wanted = [("whole", 0.0)]
    for method in METHODS:
        levels = settings.shares if method == "gamma" else settings.levels
        wanted += [(method, level) for level in levels]
    for method, level in wanted:
        if (method, level) not in done:
            recorded.log(**point(method, model, level, images, more, test))
    points = results.by_method(recorded.metrics)
    outcome = {
        "accuracy": points["merge"][0]["accuracy"],
        "premise": premise(model, images),
        "shares": results.shares(points),
        "speeds": speeds(points, model, images, test[0]),
        "points": recorded.metrics,
    }
    results.draw(recorded.directory / "pruning.png", points, settings)
    text = results.table(outcome)
    files.write(recorded.directory / "table.md", lambda path: path.write_text(text))
    recorded.finish(outcome)


def speeds(points, model, images, x):
    """How fast networks are after merging: the last within a point, and the last.

    Returns:
        The lines of these, with `images_per_second`, and that `of_whole`.
    """
    limit = results.limits(points)["recalibrated"]
    merged = points["merge"][1:]
    kept = [line for line in merged if line["recalibrated"] >= limit][-1:]
    found = []
    for line in kept + [line for line in merged[-1:] if line not in kept]:
        smaller = pruned_by("merge", model, line["level"], images).model
        whole, fast = images_per_second([model, smaller], x)
        found.append({**line, "images_per_second": fast, "of_whole": whole})
    return found


def pruned_by(method, model, level, images):
    """The network pruned by one of `METHODS`; the level is a share or a tolerance."""
    if method == "gamma":
        return without_smallest(model, level, images)
    similarity = None if method == "mean" else 1.0
    return prune(model, images, gamma=level, similarity=similarity)


def point(method, model, level, images, more, test):
    """Prunes, and says what is left.

    Args:
        method: One of `METHODS`, or `"whole"`: nothing is removed.
        model: The whole network.
        level: Share, or tolerance.
        images: What is measured.
        more: What statistics are recalibrated on.
        test: Test images and labels.

    Returns:
        Dict of `method`, `level`, the shares of `channels`, `parameters` and `macs`
        that are gone, the `error` of the outputs on `images` (the root of the mean
        square, relative), and test accuracy, `accuracy` and after recalibration,
        `recalibrated`.
    """
    line = {"method": method, "level": level}
    line |= dict.fromkeys(("channels", "parameters", "macs"), 0.0)
    smaller = copy(model)
    if method != "whole":
        pruned = pruned_by(method, model, level, images)
        smaller, line["channels"] = pruned.model, pruned.share
        for key in ("parameters", "macs"):
            before, after = getattr(pruned, key)
            line[key] = 1 - after / before
    old, new = (
        ops.convert_to_numpy(m(images, training=False)) for m in (model, smaller)
    )
    line["error"] = float(np.linalg.norm(new - old) / np.linalg.norm(old))
    line["accuracy"] = accuracy(smaller, test)
    recalibrate(smaller, more, batch_size=128, verbose=0)
    line["recalibrated"] = accuracy(smaller, test)
    return line


def accuracy(model, test):
    _, value = model.evaluate(*test, batch_size=data.TEST_BATCH_SIZE, verbose=0)
    return float(value)


def premise(model, images):
    """Whether units with about the same gamma and beta have about the same outputs.

    Returns:
        Dict of means over all units of `own_norms`: of the correlation of their outputs
        with those of the unit of the layer whose (gamma, beta) is `nearest`, of the
        mean of |correlation| over `all` others, and of its maximum, `most`. Units that
        do not vary are left out. Correlations count by their magnitudes.
    """
    found = {"nearest": [], "all": [], "most": []}
    for name in own_norms(model):
        layer = model.get_layer(name)
        values = keras.Model(model.inputs[0], layer.output)(images, training=False)
        rows = ops.convert_to_numpy(values).astype("float64")
        rows = rows.reshape(-1, rows.shape[-1])
        places = [ops.convert_to_numpy(v) for v in (layer.gamma, layer.beta)]
        varies = rows.std(0) > 1e-6
        if np.sum(varies) < 2:
            continue
        alike = np.abs(np.corrcoef(rows[:, varies].T))
        places = np.stack(places, -1)[varies]
        distances = np.linalg.norm(places[:, None] - places, axis=-1)
        np.fill_diagonal(distances, np.inf)
        others = ~np.eye(len(alike), dtype=bool)
        found["nearest"] += alike[np.arange(len(alike)), distances.argmin(1)].tolist()
        found["all"] += ((alike * others).sum(1) / others.sum(1)).tolist()
        found["most"] += np.where(others, alike, 0).max(1).tolist()
    return {key: float(np.mean(values)) for key, values in found.items()}


def images_per_second(nets, x, batch_size=128, repeats=5):
    """How fast networks are at inference, measured in turns; the fastest of each.

    Args:
        nets: List of `keras.Model`.
        x: Images, as many as to predict in one go.
    """
    seconds = [[] for _ in nets]
    for _ in range(repeats + 1):  # the first compiles
        for net, times in zip(nets, seconds):
            start = time.perf_counter()
            net.predict(x, batch_size=batch_size, verbose=0)
            times.append(time.perf_counter() - start)
    return [len(x) / min(times[1:]) for times in seconds]


if __name__ == "__main__":
    command.run(run, Settings)
