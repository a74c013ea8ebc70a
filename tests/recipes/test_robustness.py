import json

import keras
import numpy as np
import pytest

from keras_norms import diagnostics
from recipes import data, grid, robustness
from tests.recipes import tiny

SETTINGS = {**tiny.SETTINGS, "epochs": 2}
ATTACK = {"noise": 0.1, "epsilon": 0.1, "epsilon_2": 0.5, "steps": 2}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(grid.models, "build", tiny.build)
    grid._last.clear()


def test_robustness(tmp_path):
    arguments = {"norms": ("wn",), "seeds": 1, "runs_dir": tmp_path, "workers": 1}
    arguments |= {"weight_decay": 0.05, "attack": ATTACK, "test_size": 40}
    directory = robustness.robustness(SETTINGS, **arguments)
    rows = json.loads((directory / "results.json").read_text())["rows"]
    expected = [("wn", 0), ("wn", 0.05)]
    assert [(row["norm"], row["weight_decay"]) for row in rows] == expected
    for row, decay in zip(rows, ("0.0", "0.05")):
        (path,) = tmp_path.glob(f"robustness-*-wn-*weight_decay{decay}/metrics.jsonl")
        first, last = map(json.loads, path.read_text().splitlines())
        assert "inf" not in first  # only the last epoch is attacked
        assert row["runs"] == [last] and not row["diverged"]
        assert [m["samples"] for m in last["inf"]] == [40] * 3
        assert len({m["clean"] for m in [*last["inf"], last["2"]]}) == 1
        assert row["inf"]["clean"] == {"mean": last["inf"][1]["clean"], "std": 0}
    text = (directory / "table.md").read_text()
    assert "| WN | 0 |" in text and "| WN | 0.05 |" in text
    assert "| 0.9062 | 0.7187 | 0.4687 |" in text  # the paper's
    assert (directory / "epsilon.png").exists()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics*")}
    assert robustness.robustness(SETTINGS, **arguments) == directory
    assert before == {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics*")
    }


def test_summary_and_table():
    def line(attacked):
        numbers = {"clean": 0.9, "noise": 0.8, "attacked": attacked}
        numbers |= {"noise_difference": 0.1, "attack_difference": 0.9 - attacked}
        others = {**numbers, "attacked": 0}
        return {"inf": [others, numbers, others], "2": others, "weight_norm": 3.0}

    row = robustness.summary([line(0.5), line(0.7)])
    assert row["inf"]["attacked"] == pytest.approx({"mean": 0.6, "std": 0.1})
    assert row["2"]["attacked"] == {"mean": 0, "std": 0}
    row |= {"norm": "bn", "weight_decay": 0.1, "diverged": 1}
    text = robustness.table([row], robustness.ATTACK)
    assert "| BN (1 diverged) | 0.1 | 0.900 ± 0.000 | 0.800 ± 0.000 |" in text
    assert "| 0.600 ± 0.100 | 0.300 ± 0.100 | 0.9375 | 0.7812 | 0.6 |" in text
    none = {"norm": "none", "weight_decay": 0.0, "diverged": 2}
    text = robustness.table([none | robustness.summary([])], robustness.ATTACK)
    assert "(2 diverged) | 0 | – | – |" in text


def test_network_of_pixels():
    images = data.load("digits")
    model = tiny.build(
        "resnet8", (8, 8, 1), 10, robustness.norm_names.get("bn"), "relu"
    )
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


@pytest.mark.parametrize("key", ["epsilon", "noise", "epsilon_2", "steps"])
def test_bad_attack(tmp_path, key):
    with pytest.raises(ValueError, match=f"`{key}` must be positive"):
        robustness.robustness(SETTINGS, attack={key: -1}, runs_dir=tmp_path)
    with pytest.raises(ValueError, match="`weight_decay` must be positive"):
        robustness.robustness(SETTINGS, weight_decay=0.0, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
