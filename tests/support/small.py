"""Networks that compile fast, instead of those of `recipes.models`."""

import json

import pytest
from keras import Model, layers

from recipes import models
from recipes.engine import training
from recipes.models import norms

# With the convolutional network, a recipe runs in seconds.
SETTINGS = {"model": "resnet8", "train_size": 64, "batch_size": 32, "epochs": 2}


def dense(
    model, input_shape, num_classes, norm, activation, rho=1.0, omega=10.0, dtype=None
):
    """Replaces `recipes.models.build`: two Dense layers."""
    if isinstance(norm, str):
        norm = norms.get(norm, rho, omega)
    x = inputs = layers.Input(input_shape)
    x = layers.Flatten()(x)
    x = layers.Dense(8, activation=activation, name="hidden")(x)
    x = norm.before(x, "logits")
    return Model(inputs, layers.Dense(num_classes, name="logits")(x))


def convolutions(model, input_shape, num_classes, norm, activation, dtype=None):
    """Replaces `recipes.models.build`: two convolutions and a Dense layer."""
    norm = norms.get(norm) if isinstance(norm, str) else norm
    x = inputs = layers.Input(input_shape, name="image")
    for name in ("stem", "conv"):
        x = norm.before(x, name) if name != "stem" else x
        x = layers.Conv2D(4, 3, 2, "same", use_bias=norm.use_bias, name=name)(x)
        x = layers.Activation(activation)(norm.after(x, name))
    x = layers.GlobalAveragePooling2D()(x)
    x = norm.before(x, "logits")
    return Model(inputs, layers.Dense(num_classes, name="logits")(x))


def use(monkeypatch, build=convolutions):
    """Lets recipes train such networks during a test."""
    monkeypatch.setattr(models, "build", build)
    monkeypatch.setattr(training, "_last", {})  # no network of another test


@pytest.fixture(autouse=True, scope="module")
def dense_networks():
    """For a module that imports it: recipes train `dense` networks."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, dense)
        yield


def run(recipe, runs_dir, *pictures, **settings):
    """Runs a recipe, which draws `pictures`; returns its results and its table."""
    directory = recipe.run(recipe.Settings(**settings, runs_dir=str(runs_dir)))
    files = {path.name for path in directory.iterdir()}
    assert files == {"results.json", "table.md", *(f"{name}.png" for name in pictures)}
    results = json.loads((directory / "results.json").read_text())
    return results, (directory / "table.md").read_text()


def places(tmp_path):
    """Settings for the places of runs and saved models."""
    return {key: f"{tmp_path}/{key}" for key in ("runs_dir", "saved_models_dir")}


def outcome(settings=None, *epochs, **results):
    """What a training would return; `epochs` are dicts."""
    usual = {"name": "x", "diverged": False, "seconds_per_step": None}
    return training.Outcome(settings, usual | results, list(epochs))


def cells(table):
    """The cells of a table, a list for each line."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if "|" in line]
    return [[cell.strip() for cell in line] for line in lines]


def without_times(lines):
    """The epochs of a run, without measured times."""
    return [{k: v for k, v in line.items() if k[:7] != "seconds"} for line in lines]
