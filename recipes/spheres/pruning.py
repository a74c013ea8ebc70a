r"""Channels a trained network can lose: small gamma, and values that agree.

The small run, on scikit-learn's digits, and the run behind the numbers below:

    python -m recipes.spheres.pruning
    python -m recipes.spheres.pruning --dataset=cifar10 --data_dir=<where it is> \
        --epochs=6 --until=4 --measure_size=128 --statistics_size=512 \
        --test_size=1000 --levels=0.1,0.15,0.2,0.225,0.25,0.275,0.3,0.35 \
        --shares=0.05,0.1,0.15,0.2,0.3,0.5

Claim (Sun et al., Section 2.2, left there as future work): not only units with a small
gamma can be removed (Liu et al.), but also units with similar gamma and beta, because
they have similar outputs. There are three ways to remove channels of one network at
growing tolerance, without further training (`--gamma_l1` trains with Liu et al.'s
penalty on gamma):

* smallest gamma: channels with the smallest |gamma| in all layers, with their beta, as
  in Liu et al. As there, only channels made by a single layer, not those of sums.
* small gamma, mean kept: `prune(model, data, gamma=t, similarity=None)`
* and merging: `prune(model, data, gamma=t)`, where the part that another channel cannot
  express deviates by at most t.

ResNet-20 after 4 epochs of CIFAR-10 (77.7 %) loses one point of accuracy when 0.4, 0.8
and 1.1 % of the channels are removed in these ways, and with recalibrated statistics
when 1.5, 0.3 and 0.8 % are; on digits (98.1 %), recalibrated, 3.4, 2.0 and 4.1 %.
Merging helps without recalibration, but not for the reason given: units correlate with
those of the nearest gamma and beta by 0.208, with any other by 0.212. That run takes a
quarter of an hour of a core of an AMD EPYC, the small one 3 minutes
(docs/results/pruning.md).

Reference: Sun et al., AAAI 2020, Section 2.2. https://arxiv.org/abs/2006.09104
Liu et al., Network Slimming, ICCV 2017. https://arxiv.org/abs/1708.06519
"""

import dataclasses
import itertools
import timeit
from functools import partial

import keras
import numpy as np
import pandas as pd
from keras import ops

from keras_norms import CBN, prune, recalibrate
from keras_norms.surgery.prune import norms_of_one_maker
from recipes.engine import classifier, command, data, files, optimizers, training
from recipes.engine.errors import UserError
from recipes.engine.run import RESULTS, Run
from recipes.engine.settings import setting
from recipes.spheres import _pruning_results as results

# The norms whose channels `prune` measures.
NORMS = (
    *("bn", "cbn", "bn_before", "bn_rho", "bn_rho_amat", "cbn_batch", "cbn_fixed"),
    *("noisy_bn", "lp1", "lp2", "lpinf", "renorm"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slimmed(classifier.Saved):
    """A training whose last network is saved."""

    STREAMED = False
    norm: str = setting("bn", "Normalisation with a gamma a channel.", choices=NORMS)
    activation: str = "relu"
    optimizer: str | None = setting(None, "None: SGD has the penalty.", matches="$")
    gamma_l1: float = setting(0.0, "Penalty on |gamma| in training.", at_least=0)
    until: int | None = setting(None, "Stop training after this epoch.", at_least=1)
    saved_models_dir: str = "saved_models"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Slimmed):
    """One network, pruned in all ways."""

    measure_size: int = setting(
        512, "Training images to measure channels on.", at_least=1
    )
    statistics_size: int = setting(
        1024, "Training images to recalibrate on.", at_least=1
    )
    test_size: int | None = setting(
        None, "Number of test images to use; all if not given.", at_least=1
    )
    levels: tuple[float, ...] = setting(
        (0.3, 0.4, 0.5, 0.6, 0.7), "Tolerances of prune.", at_least=0, at_most=1
    )
    shares: tuple[float, ...] = setting(
        (0.05, 0.1, 0.15, 0.2, 0.3, 0.5),
        "Shares of channels of the smallest |gamma|.",
        at_least=0,
        at_most=1,
    )
    name: str | None = setting(
        None, "Name of the run, made of the settings if not given.", compare=False
    )

    def training(self):
        """The settings of the training alone."""
        names = [field.name for field in dataclasses.fields(Slimmed)]
        return Slimmed(**{name: getattr(self, name) for name in names})


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class SlimmingSGD(optimizers.SGD):
    """SGD of the loss and `gamma_l1` times the sum of |gamma| (Liu et al., Eq. 1)."""

    def __init__(self, *args, gamma_l1=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma_l1 = gamma_l1

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables or self._trainable_variables
        grads = [
            g + self.gamma_l1 * ops.sign(v) if v.name == "gamma" else g
            for g, v in zip(grads, variables)
        ]
        return super().apply(grads, trainable_variables)

    def get_config(self):
        return {**super().get_config(), "gamma_l1": self.gamma_l1}


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    return model


def own_norms(model):
    """|gamma| over the input's deviation, for norms whose channels one layer makes.

    A dict by name, without norms whose channels cannot be removed.
    """
    found = {}
    for layer in norms_of_one_maker(model):
        if layer.gamma is not None:
            rho = layer.rho if isinstance(layer, CBN) else 1
            found[layer.name] = np.abs(ops.convert_to_numpy(layer.gamma / rho))
    return found


def without_smallest(model, share, images):
    """The network without the given share of channels, those of smallest |gamma|.

    As in Liu et al.: over all layers, each of which keeps a channel, and without beta.
    """
    gammas = own_norms(model)
    limit = np.quantile(np.concatenate(list(gammas.values())), share)
    model = copy(model)
    for name, gamma in gammas.items():
        dead = gamma < min(limit, np.max(gamma))
        layer = model.get_layer(name)
        for variable in (layer.gamma, layer.beta):
            if variable is not None:
                variable.assign(ops.convert_to_numpy(variable) * ~dead)
    return prune(model, images, gamma=0.0, similarity=None)


def copy(model):
    """A copy of a model, with weights of its own."""
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    return compiled(twin)


def problem(settings):
    """The training of a classifier by `SlimmingSGD`, up to `until`."""
    optimizer = partial(SlimmingSGD, gamma_l1=settings.gamma_l1)
    epochs = min(settings.until or settings.epochs, settings.epochs)
    return classifier.problem(settings, optimizer=optimizer)._replace(epochs=epochs)


def trained(settings):
    """Trains a network, or loads an earlier result, compiled for evaluation."""
    kind = "pruning_train"
    found = training.train(settings, kind, problem, at_end=classifier.save).results
    directory = settings.directory(kind)
    if found["diverged"]:
        raise UserError(f"The training in {directory} diverged.")
    try:
        return compiled(keras.saving.load_model(found["saved_model"]))
    except Exception as error:  # zipfile, Keras and h5py raise many kinds
        reason = f"its network {found['saved_model']} cannot be loaded ({error})"
        raise files.damaged(directory / RESULTS, reason) from None


def run(settings):
    """Trains a network, prunes it in all ways and returns the directory of the run."""
    recorded = Run(settings.directory("pruning", settings.name), settings.config())
    if recorded.results is None:
        data.images(settings)  # fails early if they cannot be read
        with recorded:
            if recorded.results is None:
                measure(recorded, settings)
    points = results.by_method(recorded.metrics)
    results.draw(recorded.directory / "pruning.png", points, settings)
    text = results.table(recorded.results)
    files.write_text(recorded.directory / "table.md", text)
    return recorded.directory


def measure(recorded, settings):
    """Measures what is not measured yet; writes the results."""
    model = trained(settings.training())
    loaded = data.images(settings)
    images = loaded.x_train[: settings.measure_size].copy()
    more = loaded.x_train[: settings.statistics_size].copy()
    test = [x[: settings.test_size].copy() for x in (loaded.x_test, loaded.y_test)]
    del loaded
    data.load.cache_clear()  # frees all other images
    done = {(line["method"], line["level"]) for line in recorded.metrics}
    wanted = [("whole", 0.0), *(("gamma", share) for share in settings.shares)]
    wanted += itertools.product(("mean", "merge"), settings.levels)
    for method, level in wanted:
        if (method, level) not in done:
            recorded.log(**point(method, model, level, images, more, test))
    points = results.by_method(recorded.metrics)
    outcome = {
        "accuracy": recorded.metrics[0]["accuracy"],
        "premise": premise(model, images),
        "shares": results.shares(points),
        "speeds": speeds(points, model, images, test[0]),
        "points": recorded.metrics,
    }
    recorded.finish(outcome)


def speeds(points, model, images, x):
    """How fast two merged networks are: the last within a point, and the last one."""
    limit = results.limits(points)["recalibrated"]
    merged = points["merge"].iloc[1:].sort_values("level")
    within = merged[merged["recalibrated"] >= limit]
    chosen = pd.concat([within[-1:], merged[-1:]]).drop_duplicates("level")
    found = []
    for line in chosen.to_dict("records"):
        nets = model, pruned_by("merge", model, line["level"], images).model
        calls = [partial(net.predict, x, batch_size=128, verbose=0) for net in nets]
        # In turns; the fastest of each counts, and the first compiles.
        seconds = [[timeit.timeit(call, number=1) for call in calls] for _ in range(6)]
        whole, fast = (len(x) / np.min(seconds[1:], axis=0)).tolist()
        found.append({**line, "images_per_second": fast, "of_whole": whole})
    return found


def pruned_by(method, model, level, images):
    """The network pruned by one of `METHODS`. `level` is a share or a tolerance."""
    if method == "gamma":
        return without_smallest(model, level, images)
    similarity = None if method == "mean" else 1.0
    return prune(model, images, gamma=level, similarity=similarity)


def point(method, model, level, images, more, test):
    """What one of `METHODS`, or `"whole"`, leaves at a level: a dict.

    It has `method`, `level`, the shares of `channels`, `parameters` and `macs` that
    were removed, the `error` of the outputs on `images` (root mean square, relative),
    the test `accuracy`, and `recalibrated`, the same after recalibration on `more`
    images.
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
    outputs = [net(images, training=False) for net in (model, smaller)]
    old, new = map(ops.convert_to_numpy, outputs)
    line["error"] = float(np.linalg.norm(new - old) / np.linalg.norm(old))
    options = {"batch_size": data.TEST_BATCH_SIZE, "verbose": 0}
    _, line["accuracy"] = smaller.evaluate(*test, **options)
    recalibrate(smaller, more, batch_size=128, verbose=0)
    _, line["recalibrated"] = smaller.evaluate(*test, **options)
    return line


def premise(model, images):
    """Whether units with about the same gamma and beta have about the same outputs.

    A dict of means over all units of `own_norms` that vary: the |correlation| of their
    outputs with those of the unit in the layer whose (gamma, beta) is `nearest`, the
    mean over `all` others, and the maximum, `most`.
    """
    found = {"nearest": [], "all": [], "most": []}
    for name in own_norms(model):
        layer = model.get_layer(name)
        values = keras.Model(model.inputs[0], layer.output)(images, training=False)
        rows = np.float64(ops.convert_to_numpy(values)).reshape(-1, values.shape[-1])
        varies = rows.std(0) > 1e-6
        if np.sum(varies) < 2:
            continue
        alike = np.abs(np.corrcoef(rows[:, varies].T))
        np.fill_diagonal(alike, 0)
        places = ops.convert_to_numpy(ops.stack([layer.gamma, layer.beta], -1))[varies]
        distances = np.linalg.norm(places[:, None] - places, axis=-1)
        np.fill_diagonal(distances, np.inf)
        found["nearest"] += alike[np.arange(len(alike)), distances.argmin(1)].tolist()
        found["all"] += (alike.sum(1) / (len(alike) - 1)).tolist()
        found["most"] += alike.max(1).tolist()
    return {key: float(np.mean(values)) for key, values in found.items()}


if __name__ == "__main__":
    command.run(run, Settings)
