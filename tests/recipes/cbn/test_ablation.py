import pytest

from recipes.cbn import ablation
from recipes.cbn._paper_tables import TABLES
from recipes.engine import classifier, command
from tests.support import small


def test_run(tmp_path, monkeypatch):
    def trained(settings):
        accuracy = (len(settings.norm) + settings.rho) / 100
        return small.outcome(settings, test_accuracy=accuracy, train_loss=1.0)

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("tanh",), "rho_before": (4,), "rho_after": (0.5,)}
    own |= {"seeds": 1, "workers": 1}
    results, table = small.run(ablation, tmp_path, "accuracy", **own)
    rows = results["rows"]
    names = "bn", "cbn", "bn_before", "cbn_batch", "cbn_batch", "bn_rho", "bn_rho_amat"
    expected = zip(range(1, 8), names, (1, 4, 1, 1, 4, 0.5, 0.5))
    found = sorted((row["row"], row["norm"], row["rho"]) for row in rows)
    assert found == [*expected]
    lines = small.cells(table)
    accuracy = {row["row"]: 100 * row["test_accuracy"]["mean"] for row in rows}
    for number, value in accuracy.items():
        assert f" {value:.2f} |" in table
        mean, std = TABLES[1][1]["tanh"][number - 1]
        assert [str(number), f"{mean:.2f} ± {std:.2f}"] in lines
    (gain,) = [cells for cells in lines if cells[0] == "AMAT (2 - 5)"]
    assert gain[1] == gain[2] == f"{accuracy[2] - accuracy[5]:+.2f}"
    # Row 4 minus row 3 of Table 1, with Tanh.
    assert f"{91.29 - 89.85:+.2f} |" in table


def test_a_row_that_diverged_has_no_gain():
    outcomes = {
        ("relu", i): [small.outcome(diverged=i == 3, test_accuracy=0.1)]
        for i in (row.number for row in ablation.ROWS)
    }
    settings = ablation.Settings(activations=("relu",))
    lines = small.cells(ablation.table(outcomes, settings))
    assert ["3", "✓", "", "1", "", "diverged"] in lines
    assert ["decoupled (4 - 3)", "–", "–", "+0.23"] in lines


def test_settings():
    settings = ablation.Settings(activations=("relu", "gelu"), rho_before=(2, 4))
    rhos = {
        row.number: [settings.rho_of(row, a) for a in settings.activations]
        for row in ablation.ROWS
    }
    assert rhos[5] == rhos[2] == [2, 4] and rhos[4] == rhos[1] == [1, 1]
    assert rhos[6] == rhos[7] == [0.5, 1]  # found for digits, else 1
    for flag in ("--norm=bn", "--rho=2", "--seed=1"):  # a row has its own
        with pytest.raises(Exception, match="Unknown command line flag"):
            command.parse(ablation.Settings, [flag])
    same = ablation.Settings(dataset="a/cifar100.npz", model="vgg16")
    assert same.paper() is TABLES[4] and ablation.Settings().paper() is TABLES[1]
