"""Changes of keras_norms/ops, one at a time, and which of them no test notices.

    pip install cosmic-ray==8.7.0
    KERAS_BACKEND=torch python -m tests.programs.mutation --sample=60 --seed=0

Works on a copy of the checkout. cosmic-ray makes the mutants, pytest-cov tells which
tests run the line of each, and a fork, which has Keras already, runs these until one
fails. `--only 3 17` runs these numbers of the sample again, as after a new test.
"""

import argparse
import difflib
import io
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile

import coverage
import keras
import pytest
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

CHECKOUT = pathlib.Path(__file__).parents[2]
# Those that a tensor takes, and of comparisons one that is near and one that is not.
OPERATORS = re.compile(
    "core/(NumberReplacer|AddNot|Replace(True|False|And|Or)With.*|RemoveDecorator"
    "|Replace(Unary|Binary|Comparison)Operator_(Delete_.*|Add_Sub|Add_Mul|Sub_Add"
    "|Sub_Div|Mul_Div|Mul_Add|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul|Gt_GtE|Gt_LtE"
    "|GtE_Gt|GtE_Lt|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is))$"
)


def mutants(path):
    """All of a file: it, the line, the operator and which of its places."""
    nodes = list(ast_nodes(get_ast(path.read_text())))
    for name in filter(OPERATORS.match, plugins.operator_names()):
        operator = plugins.get_operator(name)()
        places = [(n, at) for n in nodes for at in operator.mutation_positions(n)]
        for occurrence, (node, ((line, _), _)) in enumerate(places):
            # The `*` of a parameter list is no product.
            if getattr(node.parent, "type", "") != "parameters":
                yield path, line, operator, occurrence


def run_pytest(arguments, chosen=None):
    """Pytest's exit code in a fork; `chosen` are the names of the tests to run."""

    class Chosen:
        def pytest_collection_modifyitems(self, items):
            items[:] = [i for i in items if chosen is None or i.nodeid in chosen]

    def run():
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path.insert(0, os.getcwd())
        # Python takes a compiled file for that of a source of the same second.
        sys.dont_write_bytecode = chosen is not None
        sys.stdout = io.StringIO()
        sys.exit(pytest.main(["-x", "-pno:cacheprovider", *arguments], [Chosen()]))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(timeout=3600)
    process.kill()
    process.join()
    assert process.exitcode not in (4, 5), "No test was found"
    return process.exitcode


def run(flags):
    ops = sorted(pathlib.Path("keras_norms/ops").absolute().glob("*.py"))
    found = [mutant for path in ops for mutant in mutants(path)]
    sample = random.Random(flags.seed).sample(found, flags.sample)
    print(f"{len(sample)} of {len(found)} mutants on {keras.backend.backend()}")
    options = ["--cov=keras_norms.ops", "--cov-context=test", "--cov-report="]
    assert not run_pytest([*options, *flags.tests]), "Tests fail without any change"
    lines = coverage.CoverageData(".coverage")
    lines.read()
    for number in flags.only or range(len(sample)):
        path, line, operator, occurrence = sample[number]
        contexts = lines.contexts_by_lineno(str(path)).get(line, ())
        tests = {context.partition("|")[0] for context in contexts} - {""}
        original = path.read_text()
        changed = mutate_code(original, operator, occurrence)
        path.write_text(changed)
        files = sorted({test.partition("::")[0] for test in tests}, reverse=True)
        code = run_pytest(files, tests) if tests else None
        path.write_text(original)
        outcome = {None: "not run", 0: "survived"}.get(code, "killed")
        print(f"{number}: {path.name}:{line}: {outcome} of {len(tests)}", flush=True)
        if code == 0:
            texts = original.splitlines(), changed.splitlines()
            print(*difflib.unified_diff(*texts, n=0, lineterm=""), sep="\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers in the sample")
    parser.add_argument("--tests", nargs="+", default=("tests/ops", "tests/layers"))
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        # What tests import, and pages that they read.
        for name in ("keras_norms", "tests", "recipes", "tuner", "benchmarks", "docs"):
            shutil.copytree(CHECKOUT / name, pathlib.Path(directory, name))
        shutil.copy(CHECKOUT / "pyproject.toml", directory)
        os.chdir(directory)
        run(flags)


if __name__ == "__main__":
    main()
