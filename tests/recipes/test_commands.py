"""Every command that a text of this project shows exists, and its flags parse."""

import importlib
import pathlib
import re

import keras
import pytest

from recipes.engine import command

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = sorted(
    path
    for folder in ("recipes", "tuner", "docs", "benchmarks", "saved_models")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".md", ".py")
) + [ROOT / "README.md", ROOT / "Makefile", ROOT / "CHANGELOG.md"]
COMMAND = re.compile(r"python3? -m ((?:recipes|tuner)\.[\w.]+)((?:[^\n`;|)#]|\\\n)*)")


def commands():
    found = {}
    for path in TEXTS:
        # In the place of <where it is>, a word.
        text = re.sub(r"<[^<>]*>", "1", path.read_text().replace("\\\n", " "))
        for match in COMMAND.finditer(text):
            flags = re.findall(r"(?<=\s)--?\w[^\s\"',]*(?:,[^\s\"']+)*", match[2])
            flags = [flag.rstrip(".,:") for flag in flags]
            found.setdefault((match[1].rstrip("."), *flags), path.relative_to(ROOT))
    return found


COMMANDS = commands()


def test_commands_are_found():
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_documented_command_parses(words):
    module, *flags = words
    recipe = importlib.import_module(module)
    if keras.backend.backend() != "jax":  # the only one that has populations
        flags = [flag for flag in flags if not flag.startswith("--population")]
    command.parse(recipe.Settings, flags)


def test_every_recipe_is_documented_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "recipes").glob("*/[a-z]*.py"):
        if path.parent.name in ("engine", "models"):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert f"python -m {module}" in readme
        assert f"python -m {module}" in path.read_text()
