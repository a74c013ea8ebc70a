"""Networks trained by plain gradient descent, measured every `every` steps.

What the recipes of Santurkar et al. have in common: the two networks of Appendix A.1,
each with one normalisation, at a fixed rate, without momentum, weight decay or
augmentation. An epoch of the engine is an interval of `every` steps. At its start the
weights are measured, with the batch of the step that comes next.
"""

import dataclasses
import functools
from typing import ClassVar

import keras

from recipes import models
from recipes.engine import data, training
from recipes.engine.errors import UserError
from recipes.engine.settings import SEED, Images, Sweep, setting
from recipes.models import dln, norms

VGG = {"dataset": "digits", "width": 0.125, "batch_size": 128}
VGG |= dict.fromkeys(("train_size", "test_size", "initializer"))
DLN = {"depth": dln.DEPTH, "dtype": "float64"}
# The settings of the dln are the paper's, except `every`, which it does not give.
USUAL = {
    "vgg": VGG | {"steps": 400, "every": 20, "learning_rate": 0.1},
    "dln": DLN | {"steps": 10_000, "every": 100, "learning_rate": 1e-6},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descent(Images):
    """The settings of one training. Those of the other network alone are `None`."""

    NAMED = ("network", "dataset", "norm", "seed")
    VARIABLE = ("seed", "learning_rate", "steps", "train_size", "test_size")

    network: str = setting(
        "vgg", "VGG-16, or the deep linear network (dln).", choices=[*USUAL]
    )
    norm: str = setting("bn", "Normalisation.", choices=sorted(norms.NORMS))
    seed: int = setting(
        0, "Seed of weights, of the order of images and of the dln's data.", **SEED
    )
    steps: int | None = setting(
        None, "Training steps; 400 if not given, 10,000 for the dln.", at_least=1
    )
    every: int | None = setting(
        None,
        "Steps from one measurement to the next; 20 if not given, 100 for the dln.",
        at_least=1,
    )
    learning_rate: float | None = setting(
        None, "Learning rate; 0.1 if not given, 1e-6 for the dln.", above=0
    )
    dataset: str | None = setting(
        None, "Data set of the vgg, as in recipes.train; digits if not given."
    )
    test_size: int | None = setting(
        None, "Number of test images to use; all if not given.", at_least=1
    )
    batch_size: int | None = setting(
        None, "Images in a batch of the vgg; 128 if not given.", at_least=1
    )
    width: float | None = setting(
        None,
        "Factor of the vgg's channels; 0.125 if not given, 1 in the paper.",
        above=0,
    )
    initializer: str | None = setting(
        None,
        "Initializer of the vgg; he_normal if not given. The paper has Glorot's.",
        choices=("glorot_normal", "glorot_uniform"),
    )
    depth: int | None = setting(None, "Layers of the dln; 25 if not given.", at_least=1)
    dtype: str | None = setting(
        None, "Dtype of the dln; float64 if not given.", choices=("float32", "float64")
    )

    def usual(self):
        return USUAL.get(self.network, {})

    def __post_init__(self):
        super().__post_init__()
        for key in VGG if self.network == "dln" else DLN:
            if (value := getattr(self, key)) is not None:
                raise ValueError(
                    f"Argument `{key}` must be None with network={self.network!r}. "
                    f"Received: {key}={value!r}"
                )
        if self.steps % self.every:
            raise ValueError(
                "Argument `steps` must be a multiple of `every`. "
                f"Received: steps={self.steps}, every={self.every}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layered(Descent):
    """The settings of a training in which some layers are measured."""

    VARIABLE = (*Descent.VARIABLE, "layers")
    # Each network has its own default; here the fifth, tenth and last convolution.
    LAYERS: ClassVar = {"vgg": ("stage3_conv1", "stage4_conv3", "stage5_conv3")}

    layers: tuple[str, ...] | None = setting(
        None, "Layers to measure, by name; three if not given."
    )

    def usual(self):
        return super().usual() | {"layers": self.LAYERS.get(self.network)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descents(Descent, Sweep):
    """The settings of a recipe that trains with every norm."""

    RUN = Descent

    seeds: int = 1
    norms: tuple[str, ...] = ("none", "bn")

    def about(self):
        """The network, the data and the rate, for the title of a figure."""
        each = "one run each" if self.seeds == 1 else f"{self.seeds} runs each"
        rate = f"learning rate {self.learning_rate:g}, {each}"
        if self.network == "dln":
            return f"{self.depth}-layer deep linear network\n{rate}"
        width = "" if self.width == 1 else f" of {self.width:g} width"
        return f"{data.stem(self.dataset)}, VGG-16{width}\n{rate}"

    def unit(self):
        """The unit of the loss."""
        return "sum of squares" if self.network == "dln" else "nats"


def problem(settings):
    """The training of a `Descent`, a `recipes.engine.training.Problem`."""
    test = None
    if settings.network == "dln":
        arrays = dln.regression(settings.seed)
        network, batch = functools.partial(_dln, settings), lambda step: arrays
    else:
        images = data.enlarged(data.images(settings))
        network = functools.partial(_vgg, settings, images)
        x, y = images.x_train, images.y_train
        batch = data.Batches(x, y, settings.batch_size, settings.seed).__getitem__
        some = slice(settings.test_size)
        test = images.x_test[some], images.y_test[some]

    def batches(interval):
        return _From(batch, interval * settings.every)

    schedule = keras.optimizers.schedules.PiecewiseConstantDecay
    return training.Problem(
        network,
        batches,
        settings.every,
        settings.steps // settings.every,
        test,
        schedule([], [settings.learning_rate]),
        norms.get(settings.norm).amat,
    )


class _From(keras.utils.PyDataset):
    """Endless batches, starting at a step."""

    num_batches = None

    def __init__(self, batch, step):
        super().__init__()
        self._batch, self._step = batch, step

    def __getitem__(self, i):
        return self._batch(self._step + i)


def _vgg(settings, images):
    norm = norms.get(settings.norm)
    shape = images.x_train.shape[1:]
    model = models.build("vgg16", shape, images.num_classes, norm, "relu")
    if settings.width != 1 or settings.initializer:
        model = models.scaled(model, settings.width, settings.initializer)
    model.compile(
        keras.optimizers.SGD(settings.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _dln(settings):
    with models.dtype_policy(settings.dtype):
        model = dln.dln(norms.get(settings.norm), depth=settings.depth)
        loss = dln.SumOfSquares(dtype=settings.dtype)
    held = keras.backend.standardize_dtype(model.trainable_variables[0].value.dtype)
    if held != settings.dtype:
        raise UserError(
            f"The weights are {held}, not dtype={settings.dtype}. With JAX, set the "
            "environment variable JAX_ENABLE_X64=1, or give --dtype=float32."
        )
    fast = {}
    if settings.backend == "tensorflow":
        # Steps take microseconds: without these, all time would be overhead.
        fast = {"jit_compile": True, "steps_per_execution": settings.every}
    model.compile(keras.optimizers.SGD(settings.learning_rate), loss, **fast)
    return model


def layer(model, name):
    """A layer to measure, by its name."""
    try:
        return model.get_layer(name)
    except ValueError as error:  # It lists the names.
        raise UserError(f"Argument `layers` must be names of layers. {error}") from None


def train(settings, kind, measure, **hooks):
    """Trains a network: see `recipes.engine.training.train`.

    `measure(model, batches, settings)` is called with the weights before step 0,
    `every`, 2 `every` and so on. That step uses `batches[0]`, the next `batches[1]`. It
    returns a dict for the line of metrics.jsonl, and must not change the model. Losses
    and accuracies of training are means over an interval.
    """

    def before(model, problem, settings, interval):
        measured = measure(model, problem.batches(interval), settings)
        return {"step": interval * settings.every} | measured

    return training.train(settings, kind, problem, before=before, **hooks)
