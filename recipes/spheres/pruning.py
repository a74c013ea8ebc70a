"""Channels of a trained network that can go: small gamma, and values that agree.

The small run, on scikit-learn's 8x8 digits, and that of the table below:

    python -m recipes.pruning
    python -m recipes.pruning --dataset=cifar10 --data_dir=<where it is> --epochs=6 \
        --until=4 --measure_size=128 --statistics_size=512 --test_size=1000 \
        --levels=0.1,0.15,0.2,0.225,0.25,0.275,0.3,0.35 \
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

import pathlib
import time

import keras
import numpy as np
from absl import app, flags
from keras import ops

from keras_norms import AMAT, prune, recalibrate
from recipes import data, experiment, grid, models, train
from recipes import pruning_results as results
from recipes.models import norms
from recipes.pruning_results import METHODS
from recipes.slimming import SlimmingSGD, compiled, copy, own_norms, without_smallest

SETTINGS = {"model": "resnet20", "norm": "bn", "activation": "relu"}
TRAINING = {"gamma_l1": 0.0, "until": None}  # what `recipes.train` does not have
DEFAULTS = TRAINING | {
    "measure_size": 512,
    "statistics_size": 1024,
    "test_size": None,
    "levels": "0.3,0.4,0.5,0.6,0.7",
    "shares": "0.05,0.1,0.15,0.2,0.3,0.5",
}


def complete(config):
    """Returns `config` with the default of each setting that it lacks or has as None.

    Args:
        config: Dict with any of the keys of `DEFAULTS` and of `recipes.train`.

    Returns:
        Two dicts: the settings of the training, and those of the whole run.
    """
    config = {key: value for key, value in config.items() if value is not None}
    own = {key: config.pop(key, default) for key, default in DEFAULTS.items()}
    training = train.complete(SETTINGS | config)
    for key in ("measure_size", "statistics_size", "test_size", "until"):
        if own[key] is not None and not own[key] >= 1:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={own[key]}"
            )
    if not own["gamma_l1"] >= 0:
        raise ValueError(
            "Argument `gamma_l1` must not be negative. "
            f"Received: gamma_l1={own['gamma_l1']}"
        )
    for key in ("levels", "shares"):
        try:
            values = numbers(own[key])
        except ValueError:
            values = [-1.0]
        if not all(0 <= value < 1 for value in values):
            raise ValueError(
                f"Argument `{key}` must be numbers from 0 to 1 (exclusive) with commas "
                f"between. Received: {key}={own[key]!r}"
            )
    return training | {key: own[key] for key in TRAINING}, training | own


def numbers(text):
    return [float(part) for part in text.split(",")]


def trained(config, source, runs_dir, saved_models_dir):
    """Trains a network as `recipes.train` does, or loads what came out before.

    Args:
        config: The first dict of `complete`.
        source: What `recipes.data.source` returns.
        runs_dir, saved_models_dir: As in `recipes.train.train`. The network is that of
            the last epoch.

    Returns:
        The `keras.Model`, compiled for evaluation.
    """
    name = f"pruning_train-{settings_of(config, TRAINING)}"
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is None:
        keras.backend.clear_session()
        keras.utils.set_random_seed(config["seed"])
        norm = norms.get(config["norm"], config["rho"], config["omega"])
        model = models.build(
            config["model"],
            source.image_shape,
            source.num_classes,
            norm,
            config["activation"],
            dtype=config["dtype"],
        )
        rate = train.schedule(config, source.steps)
        settings = config["momentum"], config["weight_decay"]
        optimizer = SlimmingSGD(rate, *settings, gamma_l1=config["gamma_l1"])
        compiled(model, optimizer)
        recorder = experiment.Recorder(run, model)
        last = min(config["until"] or config["epochs"], config["epochs"])
        if recorder.epoch < last:
            model.fit(
                source.batches(recorder.epoch),
                steps_per_epoch=source.steps,
                epochs=last,
                initial_epoch=recorder.epoch,
                shuffle=False,  # the batches are
                validation_data=source.test,
                validation_batch_size=data.TEST_BATCH_SIZE,
                callbacks=[AMAT(), recorder] if norm.amat else [recorder],
                verbose=0,
            )
        if recorder.diverged:
            raise ValueError(f"The training of {name} diverged: see {run.directory}")
        train.finish(run, name, model, saved_models_dir)
    model = experiment.load_model(run.results["saved_model"])
    return compiled(model)


# What is removed


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


def pruning(
    config,
    name=None,
    runs_dir="runs",
    saved_models_dir="saved_models",
    data_dir=None,
    download=False,
):
    """Trains a network and prunes it in all ways; goes on with what is not done.

    Args:
        config: See `complete`.
        name: Name of the run; made of the settings where None.
        runs_dir, saved_models_dir, data_dir, download: As in `recipes.train.train`.

    Returns:
        The path of the directory, with table.md, pruning.png and results.json.
    """
    training, config = complete(config)
    name = name or f"pruning-{settings_of(config, DEFAULTS)}"
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is None:
        source = data.source(config, data_dir, download)
        model = trained(training, source, runs_dir, saved_models_dir)
        x, sizes = (
            source.batches().x,
            (config["measure_size"], config["statistics_size"]),
        )
        images, more = (x[:size].copy() for size in sizes)
        test = tuple(array[: config["test_size"]].copy() for array in source.test)
        del source, x
        data.load.cache_clear()  # all other images
        run.keep(len(run.metrics))
        done = {(line["method"], line["level"]) for line in run.metrics}
        wanted = [("whole", 0.0)]
        for method in METHODS:
            levels = config["shares" if method == "gamma" else "levels"]
            wanted += [(method, level) for level in numbers(levels)]
        for method, level in wanted:
            if (method, level) not in done:
                run.log(**point(method, model, level, images, more, test))
        write(run, model, images, test)
    return run.directory


def settings_of(config, own):
    """A name of all settings; `own` are those that `recipes.train` does not have."""
    changes = [f"{k}{config[k]}" for k in sorted(own) if config[k] != own[k]]
    known = {k: v for k, v in config.items() if k not in DEFAULTS}
    return "-".join([train.run_name(known), *changes])


def write(run, model, images, test):
    """Measures the speed of what is left, and writes table, figure and results."""
    points = results.by_method(run.metrics)
    limit = results.limits(points)["recalibrated"]
    merged = points["merge"]
    kept = [line for line in merged[1:] if line["recalibrated"] >= limit]
    lines = kept[-1:] + [line for line in merged[-1:] if line not in kept[-1:]]
    speeds = []
    for line in lines:
        smaller = pruned_by("merge", model, line["level"], images).model
        whole, fast = images_per_second([model, smaller], test[0])
        speeds.append({**line, "images_per_second": fast, "of_whole": whole})
    outcome = {
        "accuracy": merged[0]["accuracy"],
        "premise": premise(model, images),
        "shares": results.shares(points),
        "speeds": speeds,
        "points": run.metrics,
    }
    results.draw(run.directory / "pruning.png", points, run.config)
    grid.write(run.directory, results.table(outcome), outcome)
    run.release()


def main(_):
    values = flags.FLAGS.flag_values_dict()
    config = {key: values[key] for key in (*DEFAULTS, *FLAGS)}
    places = ("name", "runs_dir", "saved_models_dir", "data_dir", "download")
    grid.report(pruning(config, **{key: values[key] for key in places}))


FLAGS = (
    *("dataset", "model", "norm", "activation", "rho", "omega", "seed"),
    *("epochs", "batch_size", "learning_rate", "weight_decay", "train_size"),
)


def _define_flags():
    sets = f"digits, {', '.join(data.TFDS)}, or the path of an .npz."
    flags.DEFINE_string("dataset", "digits", sets)
    flags.DEFINE_string("model", SETTINGS["model"], models.NAMES)
    flags.DEFINE_enum("norm", SETTINGS["norm"], sorted(norms.NORMS), "")
    flags.DEFINE_string("activation", SETTINGS["activation"], "As Keras calls it.")
    flags.DEFINE_float("rho", None, "CBN's rho, 1.", 0)
    flags.DEFINE_float("omega", None, "CBN's omega, 10.", 0)
    flags.DEFINE_integer("seed", 0, "Of weights, order, augmentation.")
    flags.DEFINE_integer("epochs", None, "120; of digits 15, of mnist 10.", 1)
    flags.DEFINE_integer("batch_size", None, "128.", 1)
    flags.DEFINE_float("learning_rate", None, "0.1, of epoch 1.", 0)
    flags.DEFINE_float("weight_decay", None, "5e-4, times weights.", 0)
    flags.DEFINE_integer("train_size", None, "Use so many training images only.", 1)
    flags.DEFINE_integer("until", None, "Stop training after this epoch of these.", 1)
    flags.DEFINE_float("gamma_l1", 0.0, "Penalty on |gamma| in training.", 0)
    for key, use in (("measure", "measured"), ("statistics", "recalibrated on")):
        key = f"{key}_size"
        flags.DEFINE_integer(key, DEFAULTS[key], f"Training images that are {use}.", 1)
    flags.DEFINE_integer("test_size", None, "All; the first ones.", 1)
    flags.DEFINE_string("levels", DEFAULTS["levels"], "Tolerances of prune.")
    flags.DEFINE_string("shares", DEFAULTS["shares"], "Shares of the smallest gamma.")
    flags.DEFINE_string("name", None, "Of the run.")
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")
    flags.DEFINE_string("saved_models_dir", "saved_models", "Where models are saved.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
