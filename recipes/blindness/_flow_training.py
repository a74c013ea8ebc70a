"""Trainings of a flow on two classes, and likelihoods of real and interpolated images.

A line of a run's metrics.jsonl has the log-likelihood of training images (in training
mode, so with batch statistics) and of test images, in nats an image of whole-numbered
pixels.
"""

import dataclasses
import functools

import keras
import numpy as np
from keras import ops

from recipes.blindness._flow_pairs import Pair
from recipes.engine import optimizers, training
from recipes.engine.settings import Images, setting
from recipes.models import norms
from recipes.models.realnvp import RealNVP

ALPHAS = [i / 10 for i in range(11)]
BATCH_SIZE = 500  # of evaluation
# Figure 3: what there is half as much of; the paper has no numbers.
ARCHITECTURES = {"full": None, "shallow": "couplings", "narrow": "width"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Images):
    """The settings of one flow."""

    NAMED = ("dataset", "classes", "norm", "seed")
    VARIABLE = ("classes", "seed", "epochs", "learning_rate", "train_size", "pairs")

    classes: str = setting("0+1", "Two labels.")
    architecture: str = setting("full", "As Figure 3.", choices=tuple(ARCHITECTURES))
    norm: str = setting("bn", "Normalisation.", choices=sorted(norms.NORMS))
    seed: int = setting(0, "Of weights, batches, noise.", at_least=0)
    between: bool = setting(True, "Norms between couplings too, not only inside.")
    size: int | None = setting(
        None, "8; of others 14. Images are averaged to this height and width."
    )
    scales: int = setting(2, "Of the flow.", at_least=1)
    couplings: int = setting(3, "Couplings with one kind of mask.", at_least=1)
    width: int | None = setting(
        None, "32; of others 16. Channels of the networks of s and t.", at_least=1
    )
    blocks: int = setting(1, "Residual blocks in them.", at_least=1)
    epochs: int | None = setting(None, "50; of others 16.", at_least=1)
    batch_size: int = setting(64, "Of training.", at_least=1)
    learning_rate: float = setting(1e-3, "Of Adam, at first.", above=0)
    train_size: int | None = setting(
        None, "Use so many training images of a pair only.", at_least=2
    )
    pairs: int | None = setting(
        None, "Interpolate so many pairs of test images only.", at_least=1
    )

    def usual(self):
        if self.dataset == "digits":
            return {"size": 8, "width": 32, "epochs": 50}
        return {"size": 14, "width": 16, "epochs": 16}


class _Nats(keras.callbacks.Callback):
    """Adds log-likelihoods to what is logged of an epoch."""

    def __init__(self, problem, settings):
        super().__init__()
        self.pair = problem.images

    def on_epoch_end(self, epoch, logs=None):
        for part, loss in (("train", logs["loss"]), ("test", logs["val_loss"])):
            nats = -loss * np.prod(self.pair.image_shape) - self.pair.log_volume
            logs[f"{part}_log_likelihood"] = float(nats)


def problem(settings):
    """The `recipes.engine.training.Problem` of a `Training`."""
    pair = Pair(
        settings.dataset,
        settings.classes,
        settings.size,
        settings.train_size,
        settings.data_dir,
        settings.download,
    )
    batches = functools.partial(pair.batches, settings.batch_size, settings.seed)
    steps = batches().steps
    return training.Problem(
        functools.partial(_network, settings, pair.image_shape),
        batches,
        steps,
        settings.epochs,
        (pair.dequantised(pair.x_test), pair.y_test),
        optimizers.piecewise_schedule(settings.learning_rate, steps * settings.epochs),
        norms.get(settings.norm).amat,
        pair,
    )


def _network(settings, image_shape):
    names = ("scales", "couplings", "width", "blocks")
    sizes = {name: getattr(settings, name) for name in names}
    if halved := ARCHITECTURES[settings.architecture]:
        sizes[halved] = max(1, sizes[halved] // 2)
    model = RealNVP(
        image_shape, settings.norm, settings.between, **sizes, name="realnvp"
    )
    model.compile(
        keras.optimizers.Adam(settings.learning_rate, global_clipnorm=1.0),
        # Nats a pixel: the largest norm of the gradient is then one for all sizes.
        lambda _, log_likelihood: -log_likelihood / model.dimensions,
    )
    return model


def train(settings):
    """Trains a flow on two classes and measures it; see `measure` for the results."""
    return training.train(
        settings, "flow", problem, at_end=_measured, callbacks=[_Nats]
    )


def _measured(model, problem, settings, run):
    nats = run.metrics[-1]["train_log_likelihood"]
    bits = _bits(nats, model.dimensions)
    return measure(model, problem.images, settings.pairs) | {"train_bits_per_dim": bits}


def _bits(nats, dimensions):
    return float(-nats / dimensions / np.log(2))


def measure(model, pair, pairs=None):
    """Likelihoods of real and interpolated test images under a flow at inference.

    Log-likelihoods are those of dequantised images with pixels from 0 to `levels`, in
    nats an image, the usual lower bound of that of the discrete image.

    Args:
        model: A `RealNVP`.
        pair: The `Pair`.
        pairs: At most so many pairs of test images are interpolated; all where None.

    Returns:
        Dict of `alpha`, a list; `mean` and `std`, over pairs, of the log-likelihood at
        each alpha; `real`, that of real images (alpha 0 and 1), and `between`, of alpha
        1/2; `gap`, the first less the second; `auroc`, the probability that a real one
        has the higher one; `batch_gap`, `batch_auroc`, the same in training mode, where
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
    real, between = np.concatenate([of_alpha[0], of_alpha[-1]]), of_alpha[middle]
    gap, auroc = apart(real, between)
    test = float(log_likelihood(pair.x_test).mean())
    x = pair.dequantised(pair.x_test[:BATCH_SIZE])
    z, _ = model.transform(x)
    back = ops.convert_to_numpy(model.inverse(z))
    weights = model.get_weights()
    first, second, halfway = interpolated[[0, -1, middle], : BATCH_SIZE // 2]
    in_training = [
        ops.convert_to_numpy(model(pair.dequantised(x), training=True))
        for x in (np.concatenate([first, second]), halfway)
    ]
    model.set_weights(weights)  # the moving statistics have gone on
    batch_gap, batch_auroc = apart(*in_training)
    return {
        "alpha": ALPHAS,
        "mean": [float(values.mean()) for values in of_alpha],
        "std": [float(values.std(ddof=1)) for values in of_alpha],
        "real": float(real.mean()),
        "between": float(between.mean()),
        "gap": gap,
        "auroc": auroc,
        "batch_gap": batch_gap,
        "batch_auroc": batch_auroc,
        "test_log_likelihood": test,
        "bits_per_dim": _bits(test, model.dimensions),
        "round_trip": float(np.abs(back - x).max()),
    }


def apart(real, between):
    """How far two arrays are apart: the difference of means, and the AUROC."""
    from sklearn.metrics import roc_auc_score

    is_real = np.repeat([1, 0], [len(real), len(between)])
    auroc = roc_auc_score(is_real, np.concatenate([real, between]))
    return float(np.mean(real) - np.mean(between)), float(auroc)
