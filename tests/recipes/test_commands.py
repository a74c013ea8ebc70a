"""Every command that a text of this project shows exists, and its flags parse."""

import importlib
import json
import pathlib
import re
import runpy
import sys

import absl.flags
import pytest

from recipes.engine import command
from recipes.models import norms
from tests.support import small
from tests.support.backend import BACKEND, later

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = sorted(
    path
    for folder in ("recipes", "tuner", "docs", "benchmarks", "saved_models")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".md", ".py")
) + [ROOT / "README.md", ROOT / "Makefile", ROOT / "CHANGELOG.md"]
COMMAND = re.compile(r"python3? -m ((?:recipes|tuner)\.[\w.]+)((?:[^\n`;|)#]|\\\n)*)")


def commands():
    """A dict from each command, its words, to the text that shows it."""
    found = {}
    for path in TEXTS:
        # In the place of <where it is>, a word.
        text = re.sub(r"<[^<>\n]*>", "1", path.read_text().replace("\\\n", " "))
        for match in COMMAND.finditer(text):
            flags = re.findall(r"(?<=\s)--?\w[^\s\"',]*(?:,[^\s\"']+)*", match[2])
            flags = [flag.rstrip(".,:") for flag in flags]
            found.setdefault((match[1].rstrip("."), *flags), path.relative_to(ROOT))
    return found


def test_every_documented_command_parses():
    found, wrong = commands(), {}
    assert len(found) > 60
    for (module, *flags), path in found.items():
        if BACKEND != "jax":  # the only one that has populations
            flags = [flag for flag in flags if not flag.startswith("--population")]
        try:
            command.parse(importlib.import_module(module).Settings, flags)
        except Exception as error:
            wrong[path, module, *flags] = error
    assert not wrong


@pytest.mark.parametrize(
    "package, program, least",
    [
        ("recipes", "recipes.train", 20),
        ("benchmarks", "benchmarks.tpu", 10),
        ("tuner", "tuner.search", 1),
    ],
)
def test_packages_list_their_programs(package, program, least, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [package])
    runpy.run_module(package)
    first, *lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: line for line in lines}
    assert program in listed and len(listed) >= least
    assert all(len(line.split()) > 4 for line in lines)
    assert not [name for name in listed if name.startswith("recipes.engine")]
    monkeypatch.setattr(sys, "argv", [package, "compare"])
    with pytest.raises(SystemExit, match="no arguments.*'compare'"):
        runpy.run_module(package)


def test_every_recipe_is_documented():
    texts = (ROOT / "docs/recipes.md").read_text()
    for path in (ROOT / "recipes").glob("*/[a-z]*.py"):
        if path.parent.name in ("engine", "models"):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert f"python -m {module}" in texts
        assert f"python -m {module}" in path.read_text()


@pytest.mark.parametrize(
    "recipe, flags, message",
    [
        ("train", "--norm=cbm", "cbm"),
        ("train", "--activation=sine", "`activation` must .*activation='sine'"),
        ("train", "--model=resnet9", "`model` must .*model='resnet9'"),
        ("train", "--stage_rho=stage1", "`stage_rho` must .*stage_rho='stage1'"),
        ("train", "--dtype=float16", "float16"),
        ("train", "--dataset=imagenet2012 --validation_size=9", "`validation_size` mu"),
        ("train", "--dataset=digitz", "`dataset` must .*imagenet2012,.*'digitz'"),
        ("compare", "--norms=bn,cbm", "`norms` must be of bn,.*'cbm' in norms="),
        ("compare", "--norms=", "`norms` must have a value. Received: norms=()"),
        ("compare", "--target_accuracy=-3", "`target_accuracy` must be at least 0"),
        ("blindness.layers", "--samples=1438", "`samples` must be at most 1437"),
        ("cbn.ablation", "--activations=relu --rho_after=1,2", "must have one number"),
        ("cbn.ablation", "--activations=foo", "`activation` must be"),
        ("cbn.assumptions", "--model=resnet50", "`model` must be a residual net"),
        ("cbn.gradient_variance", "--batches=1", "`batches` must be at least 2"),
        ("spheres.pruning", "--norm=group", "group"),
        ("spheres.weight_growth", "--model=vgg11", "`model` must be a residual net"),
        ("smoothness.landscape", "--network=dln --dataset=digits", "must be None with"),
        ("smoothness.landscape", "--steps=10 --every=3", "a multiple of `every`"),
        ("smoothness.landscape", "--longest=0.5", "`longest` must be above 0.5"),
        ("blindness.flow", "--scales=5", "`scales` must be .* scales=5, size=8"),
        ("train", "--seed=4294967296", "`seed` must be at most 4294967295"),
        ("blindness.features", "--norms=ws+gn", "`norm` must not normalise kernels"),
        ("blindness.features", "--networks=vgg12", "`model` must be one of"),
        (
            "spheres.weight_growth",
            "--weight_decays=-1",
            "`weight_decays` must be at least",
        ),
        *(
            (recipe, "--dataset=imagenet2012", "`dataset` must be one of digits, ")
            for recipe in (
                "spheres.weight_growth",
                "spheres.robustness",
                "spheres.pruning",
                "smoothness.landscape",
                "blindness.features",
            )
        ),
    ],
)
def test_bad_flags(recipe, flags, message):
    recipe = importlib.import_module(f"recipes.{recipe}")
    with pytest.raises((ValueError, absl.flags.Error), match=message):
        command.parse(recipe.Settings, flags.split())


@pytest.mark.parametrize("recipe", ["compare", "atlas", "cbn.max_lr", "blindness.flow"])
def test_help_says_which_norms_there_are(recipe):
    values = absl.flags.FlagValues()
    importlib.import_module(f"recipes.{recipe}").Settings.define_flags(values)
    for norm in norms.NORMS:
        assert re.search(rf"[ ,]{re.escape(norm)}[,.]", values["norms"].help)


@pytest.mark.parametrize("paper", ["smoothness", "blindness", "spheres", *later("cbn")])
def test_statements(paper, tmp_path):
    """Exact statements of the papers hold where docs/results/statements.md says so."""
    recipe = importlib.import_module(f"recipes.{paper}.statements")
    found, _ = small.run(recipe, tmp_path, draws=200)
    path = ROOT / f"docs/results/statements_{paper}.json"
    holds = {item: each["holds"] for item, each in json.loads(path.read_text()).items()}
    assert {item: each["holds"] for item, each in found.items()} == holds
