import json
import math

import pytest

from recipes import cbn_ablation, grid
from recipes.cbn_tables import TABLES
from tests.recipes import tiny


def test_cbn_ablation(tmp_path, monkeypatch):
    monkeypatch.setattr(grid.models, "build", tiny.build)
    directory = cbn_ablation.cbn_ablation(
        tiny.SETTINGS | {"epochs": 1},
        activations=["tanh"],
        seeds=1,
        rho_before={"tanh": 4},
        rho_after={"tanh": 0.5},
        runs_dir=tmp_path,
        workers=1,
    )
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
    accuracy = {row["row"]: 100 * row["test_accuracy"]["mean"] for row in rows}
    for number, value in accuracy.items():
        assert f"{value:.2f} ± 0.00 |" in table
        mean, std = TABLES[1][1]["tanh"][number - 1]
        assert f"| {number} | {mean:.2f} ± {std:.2f} |" in table
    gain = f"| {accuracy[2] - accuracy[5]:+.2f} |"
    assert f"| AMAT (2 - 5) {gain}" in table
    # Row 4 minus row 3 of Table 1, with Tanh.
    assert f"{91.29 - 89.85:+.2f} |" in table


def test_a_row_that_diverged_has_no_gain():
    run = {"diverged": True, "test_accuracy": 0.1}
    rows = [
        {
            "row": row.number,
            "activation": "relu",
            "rho": 1.0,
            "runs": [run | {"diverged": row.number == 3}],
            "test_accuracy": None if row.number == 3 else {"mean": 0.1, "std": 0.0},
        }
        for row in cbn_ablation.ROWS
    ]
    table = cbn_ablation.table(rows, ["relu"], *TABLES[1])
    assert "| 3 | ✓ |  | 1 |  | diverged |" in table
    assert "| decoupled (4 - 3) | – | – | +0.23 |" in table


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
    settings = {"dataset": "a/cifar100.npz", "model": "vgg16"}
    assert cbn_ablation.paper_table(settings) is TABLES[4]
    assert cbn_ablation.paper_table({"model": "resnet8"}) is TABLES[1]
