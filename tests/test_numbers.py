"""The tables of README and docs/results are those of the numbers beside them."""

import re

import pytest

from tests.support.backend import tensorflow_only
from tests.support.docs import DOCS, script


@pytest.fixture(scope="module")
def numbers():
    return script("tables")


@pytest.fixture(scope="module")
def pages(numbers):
    """A dict from each page with such a table to its text."""
    texts = {page: page.read_text() for page in numbers.PAGES}
    return {page: text for page, text in texts.items() if "<!-- numbers" in text}


def test_tables_of_files(numbers, pages):
    for page, text in pages.items():
        assert text.count("<!-- numbers") == len(numbers.BLOCK.findall(text)), page
        assert numbers.written(text) == text, page
    every = "".join(pages.values())
    files = {path.name for path in DOCS.glob("results/*.json")}
    assert files == set(re.findall(r"\w+\.json", " ".join(numbers.sources(every))))


def test_numbers_of_the_readme_stand_in_the_tables(numbers, pages):
    (text,) = (text for page, text in pages.items() if page.name == "README.md")
    # Not those of code, addresses and versions.
    versions = r"(Python|Keras|Apache) [\d.]+"
    prose = re.sub(rf"(?s)```.*?```|`.*?`|\(.*?\)|{versions}", "", text)
    found = re.findall(r"\d+\.\d+", numbers.BLOCK.sub("", prose))
    # So much less, of which the tables have what is left.
    less = re.findall(r"(?<![\d.])(\d+) %", prose)
    tables = numbers.BLOCK.finditer("".join(pages.values()))
    stand = re.findall(r"\d+\.\d+", "".join(table[0] for table in tables))
    assert len(found) > 3 and set(found) <= set(stand)
    left = {f"{1 - int(number) / 100:.2f}" for number in less}
    assert len(left) > 3 and left <= {f"{float(number):.2f}" for number in stand}


@pytest.mark.thorough
@tensorflow_only  # each command has its backend
def test_tables_of_commands(numbers, pages):
    printed = numbers.run(sum(map(numbers.commands, pages.values()), []))
    for page, text in pages.items():
        assert numbers.written(text, printed) == text, page


def test_a_changed_number_is_noticed(numbers, pages):
    text = pages[DOCS / "results/network.md"]
    changed = text.replace("| 1.00 (", "| 0.80 (")
    assert changed != text == numbers.written(changed)


PAGE = """
    python -m recipes.train --seed=1  # one

<!-- numbers: {} -->
<!-- end -->
"""
COMMAND = "python -m recipes.train --seed=1"
PRINTED = {"table.md": "| c |\n|--:|\n| 3 |\n"}


def test_a_command_may_stand_in_the_comment(numbers):
    """The other forms are those of the pages."""
    page = PAGE.format(f"table 1 of {COMMAND}")
    assert numbers.commands(page) == [COMMAND]
    assert numbers.written(page) == page
    assert "\n| c |\n| --: |\n| 3 |\n\n<" in numbers.written(page, {COMMAND: PRINTED})


@pytest.mark.parametrize(
    "source", ["no.json", "table 3 of the command above", "the command", "summary of"]
)
def test_what_is_not_there_is_named(numbers, source):
    with pytest.raises(ValueError, match=f"<!-- numbers: {source} -->"):
        numbers.written(PAGE.format(source), {COMMAND: PRINTED})
