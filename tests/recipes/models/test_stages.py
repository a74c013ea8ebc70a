import dataclasses
import json

import numpy as np
import pytest

from keras_norms import CBN
from recipes import models, train
from recipes.engine import classifier, training
from recipes.models import norms
from tests.support import small

SETTINGS = classifier.Saved(
    train_size=60,
    batch_size=16,
    epochs=3,
    model="resnet8",
    stage_rho="logits=2",
    saved_models_dir=None,
)


@pytest.mark.parametrize(
    "name, stage",
    [
        ("stage2_block0_conv1_norm", "stage2"),
        ("stage10_conv1", "stage10"),
        ("conv3_block1_1_conv", "conv3"),
        ("block5a_expand_conv", "block5"),
        ("logits_norm", "logits"),
        ("predictions", "predictions"),
    ],
)
def test_stage(name, stage):
    assert norms.stage(name) == stage


def test_rho_of_each_stage():
    rho = norms.stage_rho(4.0, "stage1=0.5,logits=2")
    model = models.build("resnet8", (8, 8, 1), 10, "cbn", "relu", rho)
    found = {
        (norms.stage(layer.name), float(layer.rho.value))
        for layer in model.layers
        if isinstance(layer, CBN)
    }
    expected = {("stage1", 0.5), ("stage2", 4.0), ("stage3", 4.0), ("logits", 2.0)}
    assert found == expected
    norms.check_stages("stage1=0.5", model)
    with pytest.raises(ValueError, match="name stages with CBN.*'stage3'.*stage7=1"):
        norms.check_stages("stage7=1", model)


@pytest.mark.parametrize(
    "text", ["", "stage1", "stage1=", "stage1=x", "=1", "stage1=0"]
)
def test_bad_stages(text):
    with pytest.raises(ValueError, match="`stage_rho` must be like"):
        classifier.Training(stage_rho=text)


def test_stopped_at_an_epoch_and_going_on_equals_uninterrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", small.build)

    def run(place, **arguments):
        training._last.clear()
        settings = dataclasses.replace(SETTINGS, runs_dir=f"{tmp_path}/{place}")
        return train.train(settings, **arguments).results

    expected = run("whole")
    assert "stage_rhologits=2" in expected["name"]
    directory = tmp_path / "parts" / expected["name"]
    first = run("parts", until=1)
    assert first["epochs"] == 1 and not first["diverged"]
    assert not (directory / "results.json").exists()
    assert run("parts", until=1)["test_accuracy"] == first["test_accuracy"]
    assert run("parts", until=2)["epochs"] == 2
    last = run("parts", until=3)
    assert json.loads((directory / "results.json").read_text()) == last
    for key in ("train_loss", "test_loss", "test_accuracy", "best_epoch"):
        np.testing.assert_array_equal(last[key], expected[key])
    assert last["saved_model"] is None
