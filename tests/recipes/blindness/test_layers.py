import json

import pytest

from recipes.blindness import layers
from recipes.engine.precision import available

pytestmark = pytest.mark.thorough
NORMS = ("none", "CBN", "BN, inference", "CBN, beta 0.5", "BN", "LN")


def test_run(tmp_path):
    settings = layers.Settings(norms=NORMS, samples=32, seeds=1, runs_dir=str(tmp_path))
    directory = layers.run(settings)
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["results.json", "shares.png", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert len(rows) == len(NORMS) * len(available()) * 2
    table = (directory / "table.md").read_text()
    assert all(table.count(f"{dtype}, mixed\n") == 1 for dtype in available())
    table, of = " ".join(table.split()), {}
    for row in rows:
        shares, norm = row["shares"], row["norm"]
        assert f"| {norm} | {shares['first']:.1e} |" in table
        limit = {"float32": 1e-4, "float64": 1e-12}[row["dtype"]]
        if norm in ("BN", "CBN"):
            assert max(shares["first"], shares["diagonal"]) < limit
        else:
            assert shares["first"] > 1e-2
        if norm in ("none", "BN, inference", "LN"):
            assert shares["diagonal"] > 1e-2
        assert shares["third"] > 1e-2
        of.setdefault(norm, []).append(shares)
    # The stored statistics of a new layer are no normalisation.
    for none, inference in zip(of["none"], of.get("BN, inference", [])):
        assert inference == pytest.approx(none, rel=1e-3)


@pytest.mark.parametrize("name", layers.NORMS)
def test_every_norm_can_be_made(name):
    model = layers.network(layers.NORMS[name](), (8, 8, 1), seed=0)
    assert model.output_shape == (None, layers.CLASSES)
