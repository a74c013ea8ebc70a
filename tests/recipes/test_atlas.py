"""The rate that is chosen, and the trainings; the table is made by test_numbers.py."""

import pytest

from recipes import atlas
from tests.support import small
from tests.support.backend import jax_only

OWN = {"activations": ("relu",), "batch_sizes": (32,), "workers": 1, "seeds": 2}
OWN |= {"norms": ("none", "cbn"), "learning_rates": (0.01, 0.1, 1.0)}


@pytest.mark.parametrize(
    "accuracies, rate", [((None, None, 0.1), 1.0), ((None, None, None), 0.01)]
)
def test_choice_among_rates_that_diverge(accuracies, rate):
    settings = atlas.Settings(**OWN)
    outcomes = [
        small.outcome(settings.one(learning_rate=r), test_accuracy=a, diverged=not a)
        for r, a in zip(OWN["learning_rates"], accuracies, strict=True)
    ]
    assert atlas.choose(outcomes, {"batch_size": 128}, settings)["rate"] == rate


@jax_only
def test_together_and_in_parts(tmp_path, monkeypatch):
    """Parts of the grid, then the whole of it from what they left."""
    small.use(monkeypatch, small.dense)
    own = OWN | {"train_size": 64, "validation_size": 16, "epochs": 1, "population": 3}
    for norm in own["norms"]:
        small.run(atlas, tmp_path, "accuracy", **own | {"norms": (norm,)})
    runs = {p: p.stat().st_mtime_ns for p in tmp_path.glob("digits*/[!.]*")}
    assert len(runs) == 2 * (3 + 2) * 3  # no checkpoint, no saved network
    found, _ = small.run(atlas, tmp_path, "accuracy", **own)
    assert all(row["runs"][0]["trials_at_once"] == 2 for row in found["rows"])
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("digits*/[!.]*")} == runs
