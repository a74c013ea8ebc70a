import pytest

from recipes.cbn import ablation
from recipes.cbn._paper_tables import TABLES
from recipes.engine import classifier, command
from recipes.engine.training import Outcome
from tests.support import small


def cells_of(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_run(tmp_path, monkeypatch):
    def trained(settings):
        accuracy = (len(settings.norm) + settings.rho) / 100
        found = {"diverged": False, "test_accuracy": accuracy, "train_loss": 1.0}
        return Outcome(settings, {"name": "x", "seconds_per_step": None} | found, [])

    monkeypatch.setattr(classifier, "train", trained)
    own = {"activations": ("tanh",), "rho_before": (4,), "rho_after": (0.5,)}
    own |= {"seeds": 1, "workers": 1}
    results, table = small.run(ablation, tmp_path, "accuracy", **own)
    rows = results["rows"]
    assert {row["row"]: (row["norm"], row["rho"]) for row in rows} == {
        1: ("bn", 1),
        2: ("cbn", 4),
        3: ("bn_before", 1),
        4: ("cbn_batch", 1),
        5: ("cbn_batch", 4),
        6: ("bn_rho", 0.5),
        7: ("bn_rho_amat", 0.5),
    }
    lines = cells_of(table)
    accuracy = {row["row"]: 100 * row["test_accuracy"]["mean"] for row in rows}
    for number, value in accuracy.items():
        assert f" {value:.2f} |" in table
        mean, std = TABLES[1][1]["tanh"][number - 1]
        assert ["", str(number), f"{mean:.2f} ± {std:.2f}", ""] in lines
    (gain,) = [cells for cells in lines if cells[1] == "AMAT (2 - 5)"]
    assert gain[2] == gain[3] == f"{accuracy[2] - accuracy[5]:+.2f}"
    # Row 4 minus row 3 of Table 1, with Tanh.
    assert f"{91.29 - 89.85:+.2f} |" in table


def test_a_row_that_diverged_has_no_gain():
    outcomes = {
        ("relu", row.number): [
            Outcome(None, {"diverged": row.number == 3, "test_accuracy": 0.1}, [])
        ]
        for row in ablation.ROWS
    }
    settings = ablation.Settings(activations=("relu",))
    lines = cells_of(ablation.table(outcomes, settings))
    assert ["", "3", "✓", "", "1", "", "diverged", ""] in lines
    assert ["", "decoupled (4 - 3)", "–", "–", "+0.23", ""] in lines


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
