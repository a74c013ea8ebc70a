import keras
import numpy as np
import pytest

from recipes.blindness import layers, synthetic
from recipes.engine.precision import available, precision
from tests.support import small
from tests.support.backend import numpy, once

LIMITS = {"float32": 1e-5, "float64": 1e-12}


@pytest.mark.parametrize("dtype", available())
def test_orders_0_to_2_do_not_pass(dtype):
    with precision(dtype):
        found = synthetic.deltas(draws=200, samples=50, seed=0)
    assert found.shape == (4, 200) and (found[0] == 0).all()
    assert found[:3].mean(1).max() <= LIMITS[dtype]
    assert abs(found[3].mean() - 0.51) < 0.33


def test_third_order_against_the_jacobian():
    """The same network and coefficients, in float64 NumPy."""
    found = synthetic.deltas(draws=20, samples=30, seed=1)
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(1)
    model = synthetic.network(20)
    x, coefficients = rng.normal(size=(30, 100)), rng.normal(size=(20, 5))
    inputs = keras.Model(model.input, model.get_layer("norm").input)
    column = numpy(inputs(x))[:, 0].astype("float64")
    y = (column - column.mean()) / column.std()
    jacobian = np.eye(30) - 1 / 30 - np.outer(y, y) / 30
    cubic = jacobian @ (3 * y[:, None] ** 2 * coefficients[:, 3])
    quartic = jacobian @ (4 * y[:, None] ** 3 * coefficients[:, 4])
    expected = np.linalg.norm(cubic, axis=0) / np.linalg.norm(cubic + quartic, axis=0)
    np.testing.assert_allclose(found[3], expected, rtol=1e-3)
    # With epsilon, the second order passes.
    found = synthetic.deltas(draws=20, samples=30, epsilon=0.1)
    assert found[1].mean() < 1e-5 < 1e-3 < found[2].mean()


def test_synthetic_run(tmp_path):
    found, table = small.run(synthetic, tmp_path, draws=5, samples=20, seeds=2)
    assert list(found) == list(available())
    mean, std = (found["float32"][3][key] for key in ("mean", "std"))
    assert f"{mean:.2e} ± {std:.2e} |\n" in table


@once
@pytest.mark.thorough
def test_layers(tmp_path):
    """Norms that are blind, or not, to each term; and that every norm can be made."""
    found, _ = small.run(layers, tmp_path, "shares", samples=32, seeds=1)
    rows, of = found["rows"], {}
    assert len(rows) == len(layers.LAYERS) * len(available()) * 2
    for row in rows:
        shares, norm = row["shares"], row["norm"]
        limit = {"float32": 1e-4, "float64": 1e-12}[row["dtype"]]
        if norm in ("BN", "CBN"):
            assert max(shares["first"], shares["diagonal"]) < limit
        if norm in ("no normalization", "BN, inference", "LN", "CBN, beta 0.5"):
            assert shares["first"] > 1e-2
        if norm in ("no normalization", "BN, inference", "LN"):
            assert shares["diagonal"] > 1e-2
        assert shares["third"] > 1e-2
        of.setdefault(norm, []).append(shares)
    # The stored statistics of a new layer are no normalisation.
    for a, b in zip(of["no normalization"], of["BN, inference"], strict=True):
        assert b == pytest.approx(a, rel=1e-3)
