"""Classifiers of images, trained as in Section 6.1 of the CBN paper.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.1. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import contextlib
import dataclasses
import pathlib

import keras

from recipes import models
from recipes.engine import data, files, imagenet, optimizers, training
from recipes.engine.errors import UserError
from recipes.engine.settings import SEED, Images, Sweep, setting
from recipes.models import norms

ACTIVATIONS = ("sigmoid", "tanh", "relu", "selu", "swish")
DTYPES = ("float32", "bfloat16", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Images):
    """The settings of a training. The defaults are the paper's for CIFAR."""

    STREAMED = True
    NAMED = ("dataset", "model", "norm", "activation", "seed")
    VARIABLE = (
        *("seed", "rho", "stage_rho", "omega", "learning_rate", "weight_decay"),
        *("momentum", "epochs", "train_size", "validation_size"),
    )

    dataset: str = setting(
        "digits",
        f"Data set: digits, {', '.join(data.TFDS + data.STREAMED)}, or an .npz file.",
    )
    model: str = setting("resnet20", models.NAMES)
    norm: str = setting("cbn", "Normalisation.", choices=sorted(norms.NORMS))
    activation: str = setting("sigmoid", "Activation, by its Keras name.")
    rho: float = setting(
        1.0, "rho of CBN layers: they divide their outputs by it.", above=0
    )
    stage_rho: str | None = setting(
        None, "rho of CBN layers by stage of the network: stage1=0.5,stage2=2."
    )
    omega: float = setting(
        10.0, "omega of CBN layers: how fast their averages follow.", at_least=0
    )
    epochs: int | None = setting(
        None, "Epochs; 120 if not given, 15 for digits, 10 for mnist.", at_least=1
    )
    seed: int = setting(
        0, "Seed of weights, of the order of images and of augmentation.", **SEED
    )
    batch_size: int | None = setting(
        None, "Images in a batch; 128 if not given, 256 for imagenet2012.", at_least=1
    )
    optimizer: str | None = setting(
        None, "Optimizer: adam is AdamW; SGD if not given.", choices=("adam",)
    )
    learning_rate: float = setting(0.1, "Learning rate of the first epoch.", above=0)
    momentum: float = setting(
        0.9, "Momentum of SGD, or beta_1 of Adam.", at_least=0, at_most=1
    )
    gradient_accumulation_steps: int | None = setting(
        None, "Batches whose mean gradient makes one step of the weights.", at_least=2
    )
    weight_decay: float | None = setting(
        None,
        "Weight decay, coupled with SGD; 5e-4 if not given, 1e-4 for imagenet2012.",
        at_least=0,
    )
    validation_size: int | None = setting(
        None, "Number of training images to hold out and to test on.", at_least=1
    )
    augment: bool | None = setting(
        None,
        "Crop and mirror training images; if not given, only of CIFAR and ImageNet.",
    )
    replacement: bool | None = setting(
        None, "Draw each batch from all images, as the CBN paper does."
    )
    image_size: int | None = setting(
        None, "Height and width of imagenet2012's images; 224 if not given.", at_least=1
    )
    dtype: str | None = setting(
        None, "Dtype policy; Keras' own, float32, if not given.", choices=DTYPES
    )

    def usual(self):
        epochs = {"digits": 15, "mnist": 10}.get(data.stem(self.dataset), 120)
        usual = {
            "epochs": epochs,
            "augment": data.augmented(self.dataset),
            "batch_size": 128,
            "weight_decay": 5e-4,
        }
        return usual | (imagenet.SETTINGS if self.dataset in data.STREAMED else {})

    def __post_init__(self):
        super().__post_init__()
        models.check(self.model, self.activation)
        self.normalisation()
        streamed = self.dataset in data.STREAMED
        of_arrays = ("validation_size", "replacement")
        for other in of_arrays if streamed else ("image_size",):
            if (value := getattr(self, other)) is not None:
                raise ValueError(
                    f"Argument `{other}` must be None with dataset={self.dataset!r}. "
                    f"Received: {other}={value}"
                )

    def program(self):
        # In other optimizers these two are not variables.
        fixed = () if self.optimizer is None else (self.momentum, self.weight_decay)
        return *super().program(), fixed

    def normalisation(self):
        """The `recipes.models.norms.Norm`."""
        rho = norms.stage_rho(self.rho, self.stage_rho)
        return norms.get(self.norm, rho, self.omega)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Training):
    """A training whose best network is saved."""

    saved_models_dir: str | None = setting(
        "saved_models", "Directory of saved models.", compare=False, directory=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid(Training, Sweep):
    """The settings of a recipe that trains many classifiers."""

    RUN = Training

    def one(self, **values):
        """The settings of one run. Those that its norm does not use have the default.

        A comparison with another rho then does not train BN again.
        """
        one = super().one(**values)
        unused = {name: getattr(self.RUN, name) for name in norms.unused(one.norm)}
        return dataclasses.replace(one, **unused)

    def about(self):
        """The data set, the network and how many runs, for the title of a figure."""
        runs = "one run each" if self.seeds == 1 else f"mean of {self.seeds} runs"
        return f"{data.stem(self.dataset)}, {self.model}, {runs}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Populations(Grid):
    """The same, where trainings of one network can run together."""

    population: int | None = setting(
        None,
        "Networks to train at once in one program, on JAX.",
        at_least=1,
        compare=False,
    )


def problem(settings, strategy=None, optimizer=None):
    """The training of a classifier, a `recipes.engine.training.Problem`.

    Args:
        settings: A `Training`.
        strategy: `None`, or what `recipes.engine.devices.get` returns.
        optimizer: Callable with the arguments of `optimizers.SGD`; `None` for the one
            in the settings.
    """
    source = data.source(settings)
    images = getattr(source, "images", None)
    norm = settings.normalisation()
    scope, layers = contextlib.nullcontext, norm
    if strategy is not None:
        scope, layers = strategy.scope, strategy.norm(norm)
        source = strategy.distribute(source, settings)

    def compiled():
        with scope():
            make = optimizer or optimizers.OF_NAME[settings.optimizer]
            return _network(settings, source, layers, make)

    steps, rate = source.steps * settings.epochs, settings.learning_rate
    drops = imagenet.DROPS if settings.dataset in data.STREAMED else optimizers.DROPS
    return training.Problem(
        compiled,
        source.batches,
        source.steps,
        settings.epochs,
        source.test,
        optimizers.piecewise_schedule(rate, steps, drops),
        norm.amat,
        images,
        strategy,
    )


def network(settings, source, norm):
    """The network of settings, for the images of a `data.source`; not compiled."""
    return models.build(
        settings.model,
        source.image_shape,
        source.num_classes,
        norm,
        settings.activation,
        dtype=settings.dtype,
    )


def _network(settings, source, norm, optimizer):
    model = network(settings, source, norm)
    try:
        norms.check_stages(settings.stage_rho, model)
    except ValueError as error:
        raise UserError(str(error)) from None
    model.compile(
        optimizer(
            settings.learning_rate,
            settings.momentum,
            settings.weight_decay,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
        ),
        # With a strategy, test batches have images of weight 0.
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=["accuracy"],
    )
    return model


def train(settings, kind="", **hooks):
    """Trains a classifier; see `recipes.engine.training.train` for the hooks."""
    return training.train(settings, kind, problem, **hooks)


def save(model, problem, settings, run):
    """Saves the network of a training; see `recipes.engine.training.train`."""
    if settings.saved_models_dir is None:
        return {"saved_model": None}
    return write(training.standalone(model, problem), settings, run)


def write(model, settings, run):
    """Saves a network for a run; returns a dict with the path, `saved_model`."""
    path = pathlib.Path(settings.saved_models_dir) / f"{run.name}.keras"
    files.sweep(path)
    # Without an optimizer, so that reading it needs keras_norms only.
    bare = keras.Model(model.input, model.output, name=model.name)
    files.write(path, bare.save)
    return {"saved_model": str(path)}
