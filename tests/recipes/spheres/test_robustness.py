import json

import keras
import numpy as np
import pytest

from keras_norms import diagnostics
from recipes import models
from recipes.engine import data, training
from recipes.models import norms
from recipes.spheres import robustness
from recipes.spheres.robustness import Settings
from tests.support import tiny

ATTACK = {"noise": 0.1, "epsilon": 0.1, "epsilon_2": 0.5, "steps": 2, "test_size": 40}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(models, "build", tiny.build)
    training._last.clear()


def written(directory):
    return {path: path.stat().st_mtime_ns for path in directory.glob("*/metrics*")}


def cells(text):
    """The cells of a table, a list a line."""
    lines = [line.strip("|").split("|") for line in text.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if len(line) > 1]


def test_robustness(tmp_path):
    settings = Settings(
        **tiny.SETTINGS | ATTACK,
        norms=("wn",),
        weight_decays=(0, 0.05),
        runs_dir=str(tmp_path),
        workers=1,
    )
    directory = robustness.run(settings)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    expected = [("wn", 0), ("wn", 0.05)]
    assert [(row["norm"], row["weight_decay"]) for row in rows] == expected
    for row, decay in zip(rows, ("0", "0.05")):
        (path,) = tmp_path.glob(f"*-wn-*weight_decay{decay}/results.json")
        found = json.loads(path.read_text())
        assert row["runs"] == [found] and not row["diverged"]
        assert [m["samples"] for m in found["inf"]] == [40] * 3
        assert len({m["clean"] for m in [*found["inf"], found["2"]]}) == 1
        assert row["inf"]["clean"] == {"mean": found["inf"][1]["clean"], "std": None}
    _, _, plain, decayed = cells((directory / "table.md").read_text())
    assert plain[:2] == ["WN", "0"] and decayed[:2] == ["WN", "0.05"]
    assert decayed[7:10] == ["0.9062", "0.7187", "0.4687"]  # the paper's
    assert (directory / "epsilon.png").exists()
    before = written(tmp_path)
    assert robustness.run(settings) == directory
    assert len(before) == 2 and before == written(tmp_path)


def test_the_attack_leaves_the_network_as_it_is(tmp_path, monkeypatch):
    """A run of a network that was attacked is that of a new network."""
    monkeypatch.setattr(robustness, "FACTORS", (1,))
    few = tiny.SETTINGS | ATTACK | {"epochs": 1}
    settings = Settings(**few, norms=("cbn",), seeds=2)
    first, second = settings.runs(weight_decay=0.0, runs_dir=str(tmp_path / "both"))
    robustness.train(first)
    model = training._last["model"]
    after = robustness.train(second)
    assert training._last["model"] is model
    training._last.clear()
    (_, alone) = settings.runs(weight_decay=0.0, runs_dir=str(tmp_path / "alone"))
    new = robustness.train(alone)
    for key in ("inf", "2", "weight_norm", "train_loss"):
        assert after.results[key] == new.results[key]


def test_summary_and_table():
    def found(attacked):
        numbers = {"clean": 0.9, "noise": 0.8, "attacked": attacked}
        numbers |= {"noise_difference": 0.1, "attack_difference": 0.9 - attacked}
        others = {**numbers, "attacked": 0}
        return {"inf": [others, numbers, others], "2": others, "weight_norm": 3.0}

    row = robustness.summary([found(0.5), found(0.7)])
    expected = pytest.approx({"mean": 0.6, "std": 0.02**0.5})
    assert row["inf"]["attacked"] == expected
    assert row["2"]["attacked"] == {"mean": 0, "std": 0}
    row |= {"norm": "bn", "weight_decay": 0.1, "diverged": 1}
    none = {"norm": "none", "weight_decay": 0.0, "diverged": 2}
    none |= robustness.summary([])
    _, _, bn, lost = cells(robustness.table([row, none], Settings(seeds=2)))
    assert bn[:3] == ["BN (1 diverged)", "0.1", "0.900 ± 0.000"]
    assert bn[5:10] == ["0.600 ± 0.141", "0.300 ± 0.141", "0.9375", "0.7812", "0.6"]
    assert lost[0].endswith("(2 diverged)") and lost[2:] == ["–"] * 10


def test_network_of_pixels():
    images = data.load("digits")
    model = tiny.build("resnet8", (8, 8, 1), 10, norms.get("bn"), "relu")
    network, x, y = robustness.pixels(model, images, 50)
    assert (x.min(), x.max()) == (0, 1) and x.dtype == "float32"
    np.testing.assert_array_equal(np.round(16 * x), np.round(16 * x, 4))  # 0 to 16
    np.testing.assert_array_equal(y, images.y_test[:50])
    np.testing.assert_allclose(
        network.predict(x, verbose=0),
        model.predict(images.x_test[:50], verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )
    found = diagnostics.bim(network, x, y, LOSS, epsilon=0.1, steps=1, verbose=0)
    assert 0.09 < np.abs(found - x).max() <= 0.1 + 1e-6


@pytest.mark.parametrize("key", ["epsilon", "noise", "epsilon_2"])
def test_bad_attack(key):
    with pytest.raises(ValueError, match=f"`{key}` must be positive"):
        Settings(**{key: -1.0})
    with pytest.raises(ValueError, match="`steps` must be at least 1"):
        Settings(steps=0)
