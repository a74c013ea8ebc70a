r"""RealNVP with BN and with LN: real digits and interpolations between two of them.

The small run, on scikit-learn's 8x8 digits; MNIST averaged to 14x14; and MNIST at full
size with deeper networks, for a GPU:

    python -m recipes.blindness.flow
    python -m recipes.blindness.flow --dataset=mnist --data_dir=<where it is> \
        --train_size=4000 --seeds=2 --architectures=full,shallow,narrow
    python -m recipes.blindness.flow --dataset=mnist --data_dir=<where it is> \
        --size=28 --scales=3 --width=32 --blocks=8 --epochs=100 \
        --architectures=full,shallow,narrow

Claim (Zhou et al., Figures 1 and 3): trained on two digits, RealNVP with LN gives real
images a much higher likelihood than `alpha x1 + (1 - alpha) x2`, with x1 of one digit
and x2 of the other; with BN it does not tell them apart. The paper names neither the
digits nor the settings. Here norms stand in the networks and between couplings, see
`recipes.models.flow_steps`.

The small run, 50 epochs, takes 4 minutes on two shared cores of an AMD EPYC; with two
seeds the gap is 31.7 nats with BN and 39.7 with LN. The second took half an hour on one
core; the last has not been run. In the second the gap is 196.5 nats with BN and 282.6
with LN, and the AUROC 0.964 and 0.975. BN does tell them apart: the claim does not hold
as stated. BN has the smaller gap, but is the better flow after these 992 steps (2.08
bits per pixel, LN 2.82). The same is true in the narrow network; in the shallow one BN
has the larger gap, 177.6 nats, LN 109.9. With `--nobetween` (norms in the networks
only) both have nearly the same gap (205.3 and 202.5).

Reference: Zhou et al., 2022, https://arxiv.org/abs/2205.15146
"""

import dataclasses
import functools
import itertools

import keras
import numpy as np
from keras import ops

from recipes.blindness._flow_pairs import Batches, Pair
from recipes.engine import command, data, figures, optimizers, results, training
from recipes.engine.settings import SEED, Images, Sweep, setting
from recipes.models import norms
from recipes.models.realnvp import RealNVP

ALPHAS = [i / 10 for i in range(11)]
BATCH_SIZE = 500  # of evaluation
# Figure 3: what is halved; the paper has no numbers.
ARCHITECTURES = {"full": None, "shallow": "couplings", "narrow": "width"}
DIGITS = {  # of the numbers in the table, in their order
    **dict.fromkeys(("real", "between", "gap", "batch_gap"), 1),
    **dict.fromkeys(("auroc", "batch_auroc", "bits_per_dim", "train_bits_per_dim"), 3),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Images):
    """The settings of one flow."""

    NAMED = ("dataset", "classes", "norm", "seed")
    VARIABLE = ("classes", "seed", "epochs", "learning_rate", "train_size")

    classes: str = setting("0+1", "Two labels, such as 0+1.")
    architecture: str = setting(
        "full", "Size of the flow, as in Figure 3.", choices=ARCHITECTURES
    )
    norm: str = setting("bn", "Normalisation.", choices=sorted(norms.NORMS))
    seed: int = setting(0, "Seed of weights, batches and noise.", **SEED)
    between: bool = setting(
        True, "Put norms between couplings too, not only inside them."
    )
    size: int | None = setting(
        None,
        "Size to average images to; if not given, 8 for digits, 16 for CIFAR-10, "
        "else 14.",
    )
    scales: int = setting(2, "Scales of the flow.", at_least=1)
    couplings: int = setting(3, "Couplings in a row with one kind of mask.", at_least=1)
    width: int | None = setting(
        None,
        "Channels of the networks s and t; 32 if not given, 16 if not digits.",
        at_least=1,
    )
    blocks: int = setting(1, "Residual blocks of the networks s and t.", at_least=1)
    epochs: int | None = setting(
        None, "Epochs; 50 if not given, 16 if not digits.", at_least=1
    )
    batch_size: int = setting(64, "Images in a batch.", at_least=1)
    learning_rate: float = setting(1e-3, "Learning rate of Adam at the start.", above=0)
    train_size: int | None = setting(
        None, "Training images of each pair; all if not given.", at_least=2
    )

    def __post_init__(self):
        super().__post_init__()
        if self.size % 2 ** (self.scales - 1):
            raise ValueError(
                "Argument `scales` must be a number that lets `size` be halved "
                f"{self.scales - 1} times. "
                f"Received: scales={self.scales}, size={self.size}"
            )

    def usual(self):
        if self.dataset == "digits":
            return {"size": 8, "width": 32, "epochs": 50}
        size = 16 if data.stem(self.dataset) == "cifar10" else 14
        return {"size": size, "width": 16, "epochs": 16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Training, Sweep):
    """A flow for each norm, pair of classes and architecture."""

    RUN = Training

    norms: tuple[str, ...] = ("bn", "layer")
    classes: tuple[str, ...] = setting(("0+1",), "Two labels, such as 0+1.")
    architectures: tuple[str, ...] = ("full",)

    def runs(self):
        """The settings of all runs."""
        runs = super().runs
        return [run for classes in self.classes for run in runs(classes=classes)]


def _nats(problem, settings):
    """Logs likelihoods in nats per image; in training, with batch statistics."""
    pixels, volume = np.prod(problem.images.image_shape), problem.images.log_volume

    def log(epoch, logs):
        for part, loss in (("train", logs["loss"]), ("test", logs["val_loss"])):
            logs[f"{part}_log_likelihood"] = float(-loss * pixels - volume)

    return keras.callbacks.LambdaCallback(on_epoch_end=log)


def problem(settings):
    """The `recipes.engine.training.Problem` of a `Training`."""
    where = {"data_dir": settings.data_dir, "download": settings.download}
    part = settings.classes, settings.size, settings.train_size
    pair = Pair(settings.dataset, *part, **where)
    batches = functools.partial(Batches, pair, settings.batch_size, settings.seed)
    steps, rate = batches().steps, settings.learning_rate
    return training.Problem(
        network=functools.partial(_network, settings, pair.image_shape),
        batches=batches,
        steps=steps,
        epochs=settings.epochs,
        test=(pair.dequantised(pair.x_test), pair.y_test),
        schedule=optimizers.piecewise_schedule(rate, steps * settings.epochs),
        amat=norms.get(settings.norm).amat,
        images=pair,
    )


def _network(settings, image_shape):
    names = ("scales", "couplings", "width", "blocks")
    sizes = {name: getattr(settings, name) for name in names}
    if halved := ARCHITECTURES[settings.architecture]:
        sizes[halved] = max(1, sizes[halved] // 2)
    model = RealNVP(image_shape, settings.norm, settings.between, **sizes)
    model.compile(
        keras.optimizers.Adam(settings.learning_rate, global_clipnorm=1.0),
        # Per pixel, so that one `global_clipnorm` suits images of all sizes.
        lambda _, log_likelihood: -log_likelihood / model.dimensions,
    )
    return model


def train(settings):
    """Trains a flow on two classes and measures it; see `measure` for the results."""
    hooks = {"at_end": measure, "callbacks": [_nats]}
    return training.train(settings, "flow", problem, **hooks)


def measure(model, problem, settings, run):
    """Likelihoods of real and interpolated test images under a flow at inference.

    The dict has `mean` and `std`, over pairs, of the log-likelihood at each `alpha`;
    its value for `real` images (alpha 0 and 1) and for those `between` (1/2); `gap` and
    `auroc`, how far `apart` these two are; `batch_gap` and `batch_auroc`, the same in
    training mode, with the 500 real images as one batch and the 250 between as another;
    `test_log_likelihood`; `bits_per_dim` for all test images and in training; and
    `round_trip`, the largest |inverse(transform(x)) - x| over 500 test images.
    """
    pair = problem.images

    def log_likelihood(x):
        x = pair.dequantised(x)
        found = model.predict(x, batch_size=BATCH_SIZE, verbose=0)
        return found.astype("float64") - pair.log_volume

    def in_training(x):
        return ops.convert_to_numpy(model(pair.dequantised(x), training=True))

    def bits(nats):
        return float(-nats / model.dimensions / np.log(2))

    interpolated = pair.interpolated(ALPHAS)
    of_alpha = [log_likelihood(x) for x in interpolated]
    real, between = _real_and_between(of_alpha)
    gap, auroc = apart(real, between)
    test = float(log_likelihood(pair.x_test).mean())
    x = pair.dequantised(pair.x_test[:BATCH_SIZE])
    back = ops.convert_to_numpy(model.inverse(model.transform(x)[0]))
    weights = model.get_weights()
    batches = _real_and_between(interpolated[:, : BATCH_SIZE // 2])
    batch_gap, batch_auroc = apart(*map(in_training, batches))
    model.set_weights(weights)  # the moving statistics have moved
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
        "bits_per_dim": bits(test),
        "round_trip": float(np.abs(back - x).max()),
        "train_bits_per_dim": bits(run.metrics[-1]["train_log_likelihood"]),
    }


def _real_and_between(of_alpha):
    """The values at alpha 0 and 1, and at 1/2."""
    return np.concatenate([of_alpha[0], of_alpha[-1]]), of_alpha[len(ALPHAS) // 2]


def apart(real, between):
    """The difference of means, and the AUROC: how often a real image is higher."""
    from sklearn.metrics import roc_auc_score

    is_real = np.repeat([1, 0], [len(real), len(between)])
    auroc = roc_auc_score(is_real, np.concatenate([real, between]))
    return float(np.mean(real) - np.mean(between)), float(auroc)


def run(settings):
    """Trains and measures every flow; returns the directory with the results."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels, lines = [], {}, {}
    for classes, architecture, norm in itertools.product(
        settings.classes, settings.architectures, settings.norms
    ):
        case = {"classes": classes, "architecture": architecture, "norm": norm}
        found = outcomes.of(**case)
        rows.append(case | summary(found))
        title = classes.replace("+", " and ")
        title += "" if len(settings.architectures) == 1 else f", {architecture}"
        panels.setdefault(title, {})[norm] = _alive(found)
        lines.setdefault(title, {})[norm] = [each.metrics for each in found]
    directory = settings.directory("blindness_flow")
    results.write(directory, table(rows, settings), {"rows": rows})
    title = f"{data.stem(settings.dataset)}, RealNVP"
    interpolation(directory / "interpolation.png", panels, title)
    curves = [
        (f"{part}_log_likelihood", f"{name} log-likelihood\n(nats)", {})
        for part, name in (("train", "training"), ("test", "test"))
    ]
    figures.curves(directory / "training.png", lines, curves, title)
    return directory


def _alive(outcomes):
    """The results of the runs that did not diverge."""
    return [each.results for each in outcomes if not each.results["diverged"]]


def summary(outcomes):
    """The results of several seeds' `Outcome`s together; `round_trip`: the largest."""
    alive = _alive(outcomes)
    return {
        "seeds": len(outcomes),
        "diverged": len(outcomes) - len(alive),
        "round_trip": max((each["round_trip"] for each in alive), default=None),
        **{key: results.mean_and_std([each[key] for each in alive]) for key in DIGITS},
    }


def table(rows, settings):
    """The rows as Markdown."""
    header = ["digits", "architecture", "norm", "real (nats)", "halfway", "gap"]
    header += ["gap, batch statistics", "AUROC", "AUROC, batch statistics"]
    header += ["test bits/dim", "training bits/dim", "round trip", "diverged"]
    lines = [
        [
            row["classes"].replace("+", " and "),
            row["architecture"],
            figures.name_of(row["norm"]),
            *(results.spread(row[key], digits) for key, digits in DIGITS.items()),
            "–" if row["round_trip"] is None else f"{row['round_trip']:.0e}",
            f"{row['diverged']} of {row['seeds']}",
        ]
        for row in rows
    ]
    return f"{results.markdown(header, lines)}\n{results.note(settings.seeds)}\n"


def interpolation(path, panels, title):
    """Draws the log-likelihood of `alpha x1 + (1 - alpha) x2`, as in Figure 1.

    Each line is the mean over the images of one seed, the band around it one deviation.
    Panels are dicts from a norm to the results of several seeds.
    """
    figure, axes = figures.subplots(1, len(panels), title, sharey=False)
    for axis, (name, part) in zip(axes[0], panels.items()):
        colour_of = figures.colours(list(part))
        for norm, found in part.items():
            colour, label = colour_of[norm], figures.name_of(norm)
            for each in found:
                mean, std = np.array([each["mean"], each["std"]], float)
                axis.plot(ALPHAS, mean, color=colour, label=label, marker=".")
                band = mean - std, mean + std
                axis.fill_between(ALPHAS, *band, color=colour, alpha=0.12, lw=0)
        axis.set(title=name, xlabel="alpha")
    axes[0, 0].set_ylabel("log-likelihood (nats)")
    figures.legend(figure, axes)
    figures.save(figure, path)


if __name__ == "__main__":
    command.run(run, Settings)
