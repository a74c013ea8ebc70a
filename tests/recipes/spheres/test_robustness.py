import keras
import numpy as np

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
    for row in rows:
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
    lost = {"norm": "none", "weight_decay": 0.0, "diverged": 2}
    lost |= robustness.summary([])
    _, _, line, *_ = small.cells(robustness.table([lost], Settings()))
    assert line[0].endswith("(2 diverged)") and line[2:] == ["–"] * 10


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
