"""The settings of a training, their defaults, and the name of a run that has them."""

import keras

from recipes import data, imagenet, models
from recipes.models import norms

# The settings that decide the outcome. They are the paper's for CIFAR.
DEFAULTS = {
    "dataset": "digits",
    "model": "resnet20",
    "norm": "cbn",
    "activation": "sigmoid",
    "rho": 1.0,
    "stage_rho": None,
    "omega": 10.0,
    "epochs": 120,
    "seed": 0,
    "batch_size": 128,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "train_size": None,
    "validation_size": None,
    "augment": False,
    "image_size": None,
    "dtype": None,
}
EPOCHS = {"digits": 15, "mnist": 10}  # where 120 are not needed
DTYPES = ("float32", "bfloat16", "mixed_bfloat16")


def complete(config):
    """Returns `config` with the default of each setting that it lacks or has as None.

    Args:
        config: Dict with any of the keys of `DEFAULTS`.

    Returns:
        Dict with all of them, and `"backend"`, that of Keras.
    """
    if unknown := sorted(config.keys() - DEFAULTS.keys() - {"backend"}):
        raise ValueError(
            f"Argument `config` must have the keys {sorted(DEFAULTS)}. "
            f"Received: config with {unknown}"
        )
    config = {key: value for key, value in config.items() if value is not None}
    dataset = data.stem(config.get("dataset", DEFAULTS["dataset"]))
    defaults = DEFAULTS | {
        "epochs": EPOCHS.get(dataset, DEFAULTS["epochs"]),
        "augment": data.augmented(dataset),
    }
    if dataset in data.STREAMED:
        defaults |= imagenet.SETTINGS
    config = defaults | config | {"backend": keras.backend.backend()}
    models.check(config["model"], config["activation"])
    _check(config)
    norms.get(config["norm"], rho(config), config["omega"])
    return config


def rho(config):
    """The rho of a run, of each stage where they differ, as `models.build` takes it."""
    return norms.stage_rho(config["rho"], config["stage_rho"])


def _check(config):
    for key in ("epochs", "batch_size", "learning_rate"):
        if not config[key] > 0:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={config[key]}"
            )
    if config["dtype"] not in (None, *DTYPES):
        raise ValueError(
            f"Argument `dtype` must be one of {', '.join(DTYPES)}. "
            f"Received: dtype={config['dtype']!r}"
        )
    size = config["image_size"]
    if size is not None and not (config["dataset"] in data.STREAMED and size > 0):
        raise ValueError(
            "Argument `image_size` must be positive, and None but for "
            f"{', '.join(data.STREAMED)}. Received: image_size={size} with "
            f"dataset={config['dataset']!r}"
        )
    if config["validation_size"] and config["dataset"] in data.STREAMED:
        raise ValueError(
            f"Argument `validation_size` must be None for {', '.join(data.STREAMED)}. "
            f"Received: validation_size={config['validation_size']}"
        )


NAMED = ("dataset", "model", "norm", "activation", "seed")


def run_name(config):
    """The name of a run: what it is, then every setting that is not the default."""
    return "-".join(
        [
            data.stem(config["dataset"]),
            config["model"],
            config["norm"],
            config["activation"],
            f"seed{config['seed']}",
            *changes(config),
        ]
    )


def changes(config):
    """A list of the settings, without those in `NAMED`, that are not the default."""
    usual = complete({"dataset": config["dataset"]}) | {"backend": "tensorflow"}
    return [
        f"{key}{config[key]}"
        for key in sorted(config.keys() - set(NAMED))
        if config[key] != usual.get(key)
    ]
