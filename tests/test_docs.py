"""The guides do what they say, and no name and no page is missing on the site."""

import pathlib
import re
import subprocess
import sys

import pytest

import keras_norms
from keras_norms import diagnostics, layers, ops, surgery
from tests.support.backend import tensorflow_only

DOCS = pathlib.Path(__file__).parents[1] / "docs"
GUIDES = [page for page in DOCS.glob("guides/*.md") if "```text" in page.read_text()]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    found = re.findall(r"^::: keras_norms\.(\S+)", pages, re.M)
    assert len(set(found)) == len(found)
    public = {*keras_norms.__all__, *layers.__all__, *surgery.__all__}
    public |= {*diagnostics.__all__, *ops.__all__} - {"backend"}
    assert {name.split(".")[-1] for name in found} >= public - {"diagnostics"}


def test_every_page_of_results_is_in_the_index():
    linked = re.findall(r"\]\((\w+\.md)\)", (DOCS / "results/README.md").read_text())
    pages = {page.name for page in DOCS.glob("results/*.md")} - {"README.md"}
    assert sorted(linked) == sorted(pages)


def outputs(text):
    return re.findall(r"```text\n(.*?)```", text, re.S)


# What must come out: a function of the numbers that each block prints.
CHECKS = {
    # Sigmoid: after the first epoch, after the last, and the loss.
    "swap": lambda n: n[0][5] > n[0][2] + 20 and n[0][6] > n[0][3] and n[0][7] < 0.1,
    "trained": lambda n: (
        n[1][0] < 1e-5
        and n[2][1] > n[0][0] + 1
        and n[3][0] < 1e-5
        and n[4][0] < 1e-5
        and n[5][0] < 1e-5
    ),
}


@pytest.mark.thorough
@tensorflow_only  # which is what a guide takes that does not say otherwise
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide(page, tmp_path):
    command = [sys.executable, DOCS / "execute.py", page, "--output", tmp_path]
    subprocess.run(command, check=True, timeout=600)
    text, now = page.read_text(), (tmp_path / page.name).read_text()
    # The page is what its blocks print, but for numbers.
    assert NUMBER.sub("0", now).split() == NUMBER.sub("0", text).split()
    pictures = set(re.findall(r"\]\((\w+\.png)\)", text))
    assert pictures == {picture.name for picture in tmp_path.glob("*.png")}
    found = [[float(x) for x in NUMBER.findall(block)] for block in outputs(now)]
    assert CHECKS[page.stem](found), found
