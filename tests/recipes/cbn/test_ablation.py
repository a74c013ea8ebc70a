import json
import math

import pytest

from recipes.cbn import ablation
from recipes.cbn._paper_tables import TABLES
from recipes.engine import classifier, command
from recipes.engine.training import Outcome


def trained(settings):
    """In the place of a training."""
    accuracy = (len(settings.norm) + settings.rho) / 100
    results = {"diverged": False, "test_accuracy": accuracy, "train_loss": 1.0}
    return Outcome(settings, {"name": "x", "seconds_per_step": None} | results, [])


def test_ablation(tmp_path, monkeypatch):
    monkeypatch.setattr(classifier, "train", trained)
    settings = ablation.Settings(
        activations=("tanh",),
        seeds=1,
        rho_before=(4,),
        rho_after=(0.5,),
        runs_dir=str(tmp_path),
        workers=1,
    )
    directory = ablation.run(settings)
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["accuracy.png", "results.json", "table.md"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    norms = {row["row"]: (row["norm"], row["rho"]) for row in rows}
    assert norms == {
        1: ("bn", 1),
        2: ("cbn", 4),
        3: ("bn_before", 1),
        4: ("cbn_batch", 1),
        5: ("cbn_batch", 4),
        6: ("bn_rho", 0.5),
        7: ("bn_rho_amat", 0.5),
    }
    table = (directory / "table.md").read_text()
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


def cells_of(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_rho_of_each_activation():
    settings = ablation.Settings(activations=("relu", "gelu"), rho_before=(2, 4))
    rhos = {
        row.number: [settings.rho_of(row, a) for a in settings.activations]
        for row in ablation.ROWS
    }
    assert rhos[5] == rhos[2] == [2, 4] and rhos[4] == rhos[1] == [1, 1]
    assert rhos[6] == rhos[7] == [0.5, 1]  # found for digits, else 1
    with pytest.raises(ValueError, match="`rho_after` must have one number.*0.5"):
        ablation.Settings(activations=("relu", "gelu"), rho_after=(0.5,))
    with pytest.raises(ValueError, match="`rho_after` must be positive"):
        ablation.Settings(activations=("relu",), rho_after=(0.0,))
    flags = command.parse(ablation.Settings, ["--activations=relu", "--rho_after=4"])
    assert flags.rho_after == (4.0,) and flags.rho_before == (2.0,)
    for flag in ("--norm=bn", "--rho=2", "--seed=1"):  # a row has its own
        with pytest.raises(Exception, match="Unknown command line flag"):
            command.parse(ablation.Settings, [flag])


@pytest.mark.parametrize(
    "number,activation,row,improvement",
    [
        (1, "sigmoid", 3, 9.81),
        (1, "selu", 2, 1.88),
        (2, "tanh", 5, 4.05),
        (2, "swish", 7, 0.32),
        (3, "sigmoid", 2, 20.87),
        (3, "relu", 3, -0.43),
        (4, "selu", 7, 1.28),
        (4, "swish", 3, 0.37),
    ],
)
def test_tables_agree_with_the_improvements_that_the_paper_prints(
    number, activation, row, improvement
):
    _, rows_of = TABLES[number]
    difference = rows_of[activation][row - 1][0] - rows_of[activation][0][0]
    assert difference == pytest.approx(improvement, abs=0.005)


def test_tables_are_whole():
    for title, rows_of in TABLES.values():
        assert len(rows_of) == 5 and "CIFAR-10" in title
        for rows in rows_of.values():
            assert len(rows) == 7
            assert all(40 < mean < 100 for mean, _ in rows)
            assert all(math.isnan(std) or std < 1 for _, std in rows)


def test_the_table_of_the_same_experiment_stands_beside():
    settings = ablation.Settings(dataset="a/cifar100.npz", model="vgg16")
    assert settings.paper() is TABLES[4]
    assert ablation.Settings().paper() is TABLES[1]
