from recipes.cbn import rho
from recipes.engine import classifier
from tests.support import small


def test_run(tmp_path, monkeypatch):
    def trained(settings):
        accuracy = 0.5 + settings.seed / 10
        line = {"epoch": 1, "test_accuracy": accuracy, "train_loss": settings.rho}
        return small.outcome(settings, line, **line)

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("relu",), "seeds": 2, "rhos": (1.0, 8.0), "workers": 1}
    pictures = "accuracy", "curves"
    found, table = small.run(rho, tmp_path, *pictures, **own, target_accuracy=0.6)
    rows = found["rows"]
    assert [row["rho"] for row in rows] == [1.0, 8.0]
    assert [row["train_loss"]["mean"] for row in rows] == [1.0, 8.0]
    assert [row["epochs_to_target"] for row in rows] == [[None, 1]] * 2
    assert table.count("| 8 ") == 3 and table.count("55.00 ± 7.07") == 2


def test_best_rhos():
    cells = {("tanh", 0.25): (None, 1.0), ("selu", 0.25): (None, 1.0)}
    cells |= {("tanh", 2.0): (0.95, 0.2), ("tanh", 4.0): (0.95, 0.1)}
    cells |= {("relu", 0.25): (0.5, 1.0), ("relu", 1.0): (0.4, 0.1)}
    rows = [
        {"activation": activation, "rho": value, "train_loss": {"mean": loss}}
        | {"test_accuracy": accuracy and {"mean": accuracy}}
        for (activation, value), (accuracy, loss) in cells.items()
    ]
    assert rho.best_rhos(rows) == {"tanh": 4.0, "relu": 0.25}
