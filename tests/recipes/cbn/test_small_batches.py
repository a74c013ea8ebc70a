from recipes.cbn import small_batches
from recipes.engine import classifier
from recipes.engine.training import Outcome
from tests.support import small


def test_run(tmp_path, monkeypatch):
    """The rate is in proportion to the batch size."""

    def trained(settings):
        accuracy = settings.learning_rate + settings.seed / 10
        diverged = settings.norm == "bn"
        found = {"name": "x", "test_accuracy": accuracy, "diverged": diverged}
        return Outcome(settings, found, [])

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("relu",), "seeds": 2, "batch_sizes": (4, 64), "workers": 1}
    own |= {"norms": ("bn", "cbn"), "learning_rate": 0.3}
    found, table = small.run(small_batches, tmp_path, "accuracy", **own)
    accuracies = [row["accuracy"] for row in found["rows"]]
    assert accuracies == ["diverged"] * 2 + ["5.94 ± 7.07", "20.00 ± 7.07"]
    assert "| CBN    | 5.94 ± 7.07 | 20.00 ± 7.07 |" in table


def test_default_run_trains(tmp_path, small_network):
    own = {"activations": ("relu",), "norms": ("cbn",), "batch_sizes": (16, 32)}
    own |= {"model": "resnet8", "train_size": 64, "epochs": 1, "seeds": 1, "workers": 1}
    found, _ = small.run(small_batches, tmp_path, "accuracy", **own)
    names = [row["runs"][0]["name"] for row in found["rows"]]
    for name, size in zip(names, (16, 32), strict=True):
        assert f"-batch_size{size}-" in name
        files = {path.name for path in (tmp_path / name).glob("[!.]*")}
        assert files == {"config.json", "metrics.jsonl", "results.json"}
