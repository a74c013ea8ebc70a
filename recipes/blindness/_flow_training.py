"""Trainings of a flow on two classes, and likelihoods of real and interpolated images.

A run writes `<runs_dir>/<name>/`; a line of its metrics.jsonl is an epoch, with the
log-likelihood of training images (in training mode, so with batch statistics) and of
test images.
"""

import pathlib

import keras
import numpy as np
from keras import ops

from keras_norms import AMAT
from recipes import data, experiment, optimizers
from recipes.flow_pairs import Pair
from recipes.models import norms
from recipes.models.realnvp import RealNVP

ALPHAS = [i / 10 for i in range(11)]
BATCH_SIZE = 500  # of evaluation
DEFAULTS = {
    "dataset": "digits",
    "norm": "bn",
    "first": 3,
    "second": 8,
    "seed": 0,
    "size": 8,
    "train_size": None,
    "between": True,
    "scales": 2,
    "couplings": 3,
    "width": 32,
    "blocks": 1,
    "epochs": 100,
    "batch_size": 64,
    "learning_rate": 1e-3,
}
MNIST = {"size": 14, "width": 16, "epochs": 16}


def complete(config):
    """Returns `config` with the default of each setting that it lacks or has as None.

    Args:
        config: Dict with any of the keys of `DEFAULTS`. `first` and `second` are the
            two classes.
    """
    config = {key: value for key, value in config.items() if value is not None}
    if unknown := sorted(config.keys() - DEFAULTS.keys() - {"backend"}):
        raise ValueError(
            f"A flow has the settings {sorted(DEFAULTS)}. "
            f"Received: config with {unknown}"
        )
    usual = _usual(config.get("dataset", "digits"))
    config = usual | config | {"backend": keras.backend.backend()}
    norms.get(config["norm"])
    for key in ("epochs", "batch_size", "learning_rate"):
        if not config[key] > 0:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={config[key]}"
            )
    return config


def _usual(dataset):
    return DEFAULTS | ({} if dataset == "digits" else MNIST) | {"dataset": dataset}


def run_name(config):
    """The name of a run: what it is, then every setting that is not the default."""
    classes = f"{config['first']}+{config['second']}"
    parts = ["flow", data.stem(config["dataset"]), classes, config["norm"]]
    return "-".join([*parts, f"seed{config['seed']}", *changes(config)])


def changes(config):
    """A list of the settings, without those in every name, that are not the default."""
    usual = _usual(config["dataset"]) | {"backend": "tensorflow"}
    named = ("dataset", "norm", "first", "second", "seed")
    return [
        f"{key}{config[key]}"
        for key in sorted(config.keys() - set(named))
        if config[key] != usual[key]
    ]


class _Recorder(experiment.Recorder):
    """Logs log-likelihoods, in nats an image of whole-numbered pixels."""

    def __init__(self, run, model, pair):
        super().__init__(run, model)
        self.best = {}
        self.pair = pair

    def on_epoch_end(self, epoch, logs=None):
        self.epoch = epoch + 1
        size = np.prod(self.pair.image_shape)

        def nats(loss):
            return float(-loss * size - self.pair.log_volume)

        self.run.log(
            epoch=self.epoch,
            train_log_likelihood=nats(logs["loss"]),
            test_log_likelihood=nats(logs["val_loss"]),
        )
        if np.isfinite(logs["loss"]):
            experiment.write(self.run.checkpoint, self._save)
        else:
            self.model.stop_training = True


_last = {}  # the key and the model of the last training in this process


def _compiled(config, image_shape, steps):
    """The flow of a config, compiled; that of the last training if it is the same.

    Runs that differ in the classes and the seed alone are one program, which takes
    longer to make than a small training. The flow then gets the weights of a new one.
    """
    key = {k: v for k, v in config.items() if k not in ("seed", "first", "second")}
    key |= {"steps": steps}
    again = _last.get("key") == key
    if not again:
        _last.clear()
        keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    settings = ("norm", "between", "scales", "couplings", "width", "blocks")
    model = RealNVP(image_shape, **{k: config[k] for k in settings}, name="realnvp")
    if again:
        new = {variable.path: variable for variable in model.variables}
        model = _last["model"]
        for variable in model.variables:
            if variable.path in new:  # not what AMAT added, which it sets itself
                variable.assign(new[variable.path])
        for variable in model.optimizer.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))
        return model
    rate = optimizers.piecewise_schedule(
        config["learning_rate"], steps * config["epochs"]
    )
    model.compile(
        keras.optimizers.Adam(rate, global_clipnorm=1.0),
        # Nats a pixel: the largest norm of the gradient is then one for all sizes.
        lambda _, log_likelihood: -log_likelihood / model.dimensions,
    )
    _last.update(key=key, model=model)
    return model


def train(config, pairs=None, runs_dir="runs", data_dir=None, download=False):
    """Trains a flow on two classes and measures it, or returns what came out before.

    Args:
        config: See `complete`.
        pairs: At most so many pairs of test images are interpolated; all where None.
        runs_dir: The run is recorded in `<runs_dir>/<name>/`.
        data_dir, download: Arguments of `recipes.data.load`.

    Returns:
        The results, a dict of what `measure` returns, `name`, `epochs` and `diverged`;
        and the lines of metrics.jsonl, a list of dicts. What is not finite is `None`.
    """
    config = complete(config)
    run = experiment.Run(pathlib.Path(runs_dir) / run_name(config), config)
    if run.results is not None:
        return run.results, run.metrics
    pair = Pair(
        config["dataset"],
        (config["first"], config["second"]),
        config["size"],
        config["train_size"],
        data_dir,
        download,
    )
    batches = pair.batches(config["batch_size"], config["seed"])
    model = _compiled(config, pair.image_shape, batches.steps)
    recorder = _Recorder(run, model, pair)
    batches.first_epoch = recorder.epoch
    if recorder.epoch < config["epochs"]:
        amat = [AMAT()] if norms.get(config["norm"]).amat else []
        model.fit(
            batches,
            steps_per_epoch=batches.steps,
            epochs=config["epochs"],
            initial_epoch=recorder.epoch,
            shuffle=False,  # `batches` are
            validation_data=(pair.dequantised(pair.x_test), pair.y_test),
            validation_batch_size=BATCH_SIZE,
            callbacks=[*amat, recorder],
            verbose=0,
        )
    diverged = run.metrics[-1]["train_log_likelihood"] is None
    run.finish(
        {
            "name": run_name(config),
            "epochs": len(run.metrics),
            "diverged": diverged,
            **({} if diverged else measure(model, pair, pairs)),
        }
    )
    return run.results, run.metrics


def measure(model, pair, pairs=None):
    """Likelihoods of real and interpolated test images under a flow at inference.

    Log-likelihoods are those of dequantised images with pixels from 0 to `levels`, in
    nats an image, the usual lower bound of that of the discrete image.

    Args:
        model: A `RealNVP`.
        pair: The `Pair`.
        pairs: See `train`.

    Returns:
        Dict of `alpha`, a list; `mean` and `std`, over pairs, of the log-likelihood at
        each alpha; `gap`, the mean of real images (alpha 0 and 1) less that of alpha
        1/2; `auroc`, the probability that a real one has a higher log-likelihood than
        one of alpha 1/2; `batch_gap`, `batch_auroc`, the same in training mode, where
        the 500 real ones are one batch, and the 250 between another;
        `test_log_likelihood`, `bits_per_dim`, of all test images; and `round_trip`, the
        largest |inverse(transform(x)) - x| of 500 of them.
    """

    def log_likelihood(x):
        x = pair.dequantised(x)
        found = model.predict(x, batch_size=BATCH_SIZE, verbose=0)
        return found.astype("float64") - pair.log_volume

    interpolated = pair.interpolated(ALPHAS, pairs)
    middle = len(ALPHAS) // 2
    of_alpha = [log_likelihood(x) for x in interpolated]
    gap, auroc = apart(np.concatenate([of_alpha[0], of_alpha[-1]]), of_alpha[middle])
    test = log_likelihood(pair.x_test).mean()
    x = pair.dequantised(pair.x_test[:BATCH_SIZE])
    z, _ = model.transform(x)
    back = ops.convert_to_numpy(model.inverse(z))
    weights = model.get_weights()
    first, second, between = interpolated[[0, -1, middle], : BATCH_SIZE // 2]
    batches = (np.concatenate([first, second]), between)
    in_training = [
        ops.convert_to_numpy(model(pair.dequantised(x), training=True)) for x in batches
    ]
    model.set_weights(weights)  # the moving statistics have gone on
    batch_gap, batch_auroc = apart(*in_training)
    return {
        "alpha": ALPHAS,
        "mean": [float(values.mean()) for values in of_alpha],
        "std": [float(values.std()) for values in of_alpha],
        "gap": gap,
        "auroc": auroc,
        "batch_gap": batch_gap,
        "batch_auroc": batch_auroc,
        "test_log_likelihood": float(test),
        "bits_per_dim": float(-test / model.dimensions / np.log(2)),
        "round_trip": float(np.abs(back - x).max()),
    }


def apart(real, between):
    """How far two arrays are apart: the difference of means, and the AUROC."""
    from sklearn.metrics import roc_auc_score

    is_real = np.repeat([1, 0], [len(real), len(between)])
    auroc = roc_auc_score(is_real, np.concatenate([real, between]))
    return float(np.mean(real) - np.mean(between)), float(auroc)
