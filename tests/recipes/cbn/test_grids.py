"""Recipes that train a grid and measure nothing else.

Their tables are those of docs/results, which `tests/test_numbers.py` makes anew.
"""

from recipes.cbn import ablation, rho, small_batches
from recipes.cbn._paper_tables import TABLES
from recipes.engine import classifier
from tests.support import small


def test_ablation(tmp_path, monkeypatch):
    def trained(settings):
        accuracy = (len(settings.norm) + settings.rho) / 100
        diverged = settings.norm == "bn_before"
        found = {"test_accuracy": accuracy, "train_loss": 1.0, "diverged": diverged}
        return small.outcome(settings, **found)

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("tanh",), "rho_before": (4,), "rho_after": (0.5,)}
    results, table = small.run(ablation, tmp_path, "accuracy", **own, workers=1)
    names = "bn", "cbn", "bn_before", "cbn_batch", "cbn_batch", "bn_rho", "bn_rho_amat"
    expected = zip(range(1, 8), names, (1, 4, 1, 1, 4, 0.5, 0.5))
    rows = sorted((row["row"], row["norm"], row["rho"]) for row in results["rows"])
    assert rows == [*expected]
    lines = small.cells(table)
    assert ["3", "✓", "", "1", "", "diverged"] in lines
    # The paper's: row 4 minus row 3 of Table 1, with Tanh.
    assert ["decoupled (4 - 3)", "–", "–", f"{91.29 - 89.85:+.2f}"] in lines
    assert ["AMAT (2 - 5)", "-6.00", "-6.00"] in [line[:3] for line in lines]


def test_settings_of_the_ablation():
    settings = ablation.Settings(activations=("relu", "gelu"), rho_before=(2, 4))
    rhos = {
        row.number: [settings.rho_of(row, a) for a in settings.activations]
        for row in ablation.ROWS
    }
    assert rhos[5] == rhos[2] == [2, 4] and rhos[4] == rhos[1] == [1, 1]
    assert rhos[6] == rhos[7] == [0.5, 1]  # found for digits, else 1
    same = ablation.Settings(dataset="a/cifar100.npz", model="vgg16")
    assert same.paper() is TABLES[4] and ablation.Settings().paper() is TABLES[1]


def test_small_batches_have_rates_in_proportion(tmp_path, monkeypatch):
    def trained(settings):
        return small.outcome(settings, test_accuracy=settings.learning_rate)

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("relu",), "norms": ("cbn",), "batch_sizes": (4, 64)}
    own |= {"learning_rate": 0.3, "workers": 1}
    found, _ = small.run(small_batches, tmp_path, "accuracy", **own)
    accuracies = [row["accuracy"] for row in found["rows"]]
    assert accuracies == ["0.94 ± 0.00", "15.00 ± 0.00"]


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
