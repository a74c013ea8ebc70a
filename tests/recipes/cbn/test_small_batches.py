from recipes.cbn import small_batches
from recipes.engine import classifier
from tests.support import small


def test_run(tmp_path, monkeypatch):
    """The rate is in proportion to the batch size."""

    def trained(settings):
        accuracy = settings.learning_rate + settings.seed / 10
        diverged = settings.norm == "bn"
        return small.outcome(settings, test_accuracy=accuracy, diverged=diverged)

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("relu",), "seeds": 2, "batch_sizes": (4, 64), "workers": 1}
    own |= {"norms": ("bn", "cbn"), "learning_rate": 0.3}
    found, table = small.run(small_batches, tmp_path, "accuracy", **own)
    accuracies = [row["accuracy"] for row in found["rows"]]
    assert accuracies == ["diverged"] * 2 + ["5.94 ± 7.07", "20.00 ± 7.07"]
    assert "| CBN    | 5.94 ± 7.07 | 20.00 ± 7.07 |" in table
