import pytest

from recipes.blindness import layers
from recipes.engine.precision import available
from tests.support import small

pytestmark = pytest.mark.thorough


def test_run(tmp_path):
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
