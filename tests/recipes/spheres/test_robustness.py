import keras
import numpy as np
import pytest

from keras_norms import diagnostics
from recipes.engine import data
from recipes.spheres import robustness
from recipes.spheres.robustness import Settings
from tests.support import small
from tests.support.backend import numpy

ATTACK = {"noise": 0.1, "epsilon": 0.1, "epsilon_2": 0.5, "steps": 2, "test_size": 40}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_robustness(tmp_path, small_network):
    own = ATTACK | {"norms": ("bn",), "weight_decays": (0, 0.05), "workers": 1}
    found, table = small.run(robustness, tmp_path, "epsilon", **own, **small.SETTINGS)
    rows = found["rows"]
    for row, decay in zip(rows, (0, 0.05), strict=True):
        assert (row["norm"], row["weight_decay"], row["diverged"]) == ("bn", decay, 0)
        (found,) = row["runs"]
        assert [m["samples"] for m in found["inf"]] == [40] * 3
        assert len({m["clean"] for m in [*found["inf"], found["2"]]}) == 1
        assert row["inf"]["clean"] == {"mean": found["inf"][1]["clean"], "std": None}
    _, _, plain, decayed, _, _, changed = small.cells(table)
    assert plain[:2] == ["BN", "0"] and decayed[:2] == ["BN", "0.05"]
    lost = [row["inf"]["attack_difference"]["mean"] for row in rows]
    # The paper's: 0.3375 - 0.4307 in Table 1, 0.5005 - 0.5478 in Table 2.
    here = f"{100 * (lost[1] - lost[0]):+.1f}"
    assert changed[2:] == [here, "+0.0", "-9.3", "-6.7", "-4.7"]


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
    _, _, bn, lost, *_ = small.cells(robustness.table([row, none], Settings(seeds=2)))
    assert bn[:3] == ["BN (1 diverged)", "0.1", "0.900 ± 0.000"]
    # The paper's are those with decay.
    assert bn[5:10] == ["0.600 ± 0.141", "0.300 ± 0.141", "0.9375", "0.7812", "0.6"]
    assert lost[0].endswith("(2 diverged)") and lost[2:] == ["–"] * 10


def test_network_of_pixels():
    images = data.load("digits")
    model = small.convolutions("resnet8", (8, 8, 1), 10, "bn", "relu")
    network, x, y = robustness.pixels(model, images, 50)
    assert (x.min(), x.max()) == (0, 1) and x.dtype == "float32"
    np.testing.assert_array_equal(np.round(16 * x), np.round(16 * x, 4))  # 0 to 16
    np.testing.assert_array_equal(y, images.y_test[:50])
    expected, actual = model(images.x_test[:50]), network(x)
    np.testing.assert_allclose(numpy(actual), numpy(expected), rtol=1e-4, atol=1e-5)
    found = diagnostics.bim(network, x, y, LOSS, epsilon=0.1, steps=1, verbose=0)
    assert 0.09 < np.abs(found - x).max() <= 0.1 + 1e-6
