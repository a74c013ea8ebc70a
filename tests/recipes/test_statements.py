"""Exact statements of the papers hold as docs/results/statements.md says."""

import importlib
import json
import pathlib

import pytest

from tests.support import small
from tests.support.backend import later

RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("paper", ["smoothness", "blindness", "spheres", *later("cbn")])
def test_statements(paper, tmp_path):
    recipe = importlib.import_module(f"recipes.{paper}.statements")
    found, _ = small.run(recipe, tmp_path, draws=200)
    stored = json.loads((RESULTS / f"statements_{paper}.json").read_text())
    holds = {item: each["holds"] for item, each in stored.items()}
    assert {item: each["holds"] for item, each in found.items()} == holds
    page = (RESULTS / "statements.md").read_text()
    page = page.partition(f"-m recipes.{paper}.")[2].partition("\n## ")[0]
    rows = dict(
        line[2:].split(" | ", 1) for line in page.splitlines() if line[:2] == "| "
    )
    assert rows.keys() - {"item", "---"} == stored.keys()
    for item, each in stored.items():
        end = f" | {each['computed']:.3g} | {'yes' if each['holds'] else 'no'} |"
        assert rows[item].endswith(end)
