import json
import re

import pytest

from recipes.blindness import layers
from recipes.engine.precision import available

NORMS = ("none", "BN", "BN, inference", "CBN", "CBN, beta 0.5", "LN")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    runs_dir = str(tmp_path_factory.mktemp("runs"))
    settings = layers.Settings(norms=NORMS, samples=32, seeds=1, runs_dir=runs_dir)
    return layers.run(settings)


def test_run(directory):
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["results.json", "shares.png", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    assert len(rows) == len(NORMS) * len(available()) * 2
    text = (directory / "table.md").read_text()
    for dtype in available():
        assert text.count(f"{dtype}, mixed\n") == 1
    for row in rows:
        assert re.search(rf"\| {row['norm']} +\| +{row['shares']['first']:.1e} ", text)


def test_what_the_rows_say(directory):
    rows = json.loads((directory / "results.json").read_text())["rows"]
    for row in rows:
        limit = {"float32": 1e-4, "float64": 1e-12}[row["dtype"]]
        first, diagonal = row["shares"]["first"], row["shares"]["diagonal"]
        blind_to_first = row["norm"] in ("BN", "CBN")
        assert first < limit if blind_to_first else first > 1e-2
        if blind_to_first:
            assert diagonal < limit
        if row["norm"] in ("none", "BN, inference", "LN"):
            assert diagonal > 1e-2
        assert row["shares"]["third"] > 1e-2


def test_stored_statistics_of_a_new_layer_are_no_normalisation(directory):
    rows = json.loads((directory / "results.json").read_text())["rows"]
    shares = {
        name: [row["shares"] for row in rows if row["norm"] == name]
        for name in ("none", "BN, inference")
    }
    for none, inference in zip(*shares.values(), strict=True):
        assert inference == pytest.approx(none, rel=1e-3)


@pytest.mark.parametrize("name", layers.NORMS)
def test_every_norm_can_be_made(name):
    norm = layers.NORMS[name]()
    model = layers.network(norm, (8, 8, 1), seed=0)
    assert model.output_shape == (None, layers.CLASSES)
