"""Changes of keras_norms/ops, one at a time, and which of them no test notices.

    KERAS_BACKEND=torch python -m tests.programs.mutation --sample=60 --seed=0

Works on a copy of the checkout. pytest-cov tells which tests run the line of a change;
these run until one fails. `--only 3 17` tries these numbers of the sample again, as
after a new test.
"""

import argparse
import ast
import difflib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import coverage

CHECKOUT = pathlib.Path(__file__).parents[2]
# Each takes the place of any other in a group.
OPERATORS = "Add Sub Mult Div, Mult Pow, FloorDiv Mod, Gt GtE Lt LtE, Eq NotEq, And Or"


def others(node):
    """What may stand in the place of a part of a program."""
    if isinstance(node, list):
        for i, part in enumerate(node):
            yield from ([*node[:i], other, *node[i + 1 :]] for other in others(part))
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        is_switch = isinstance(node.value, bool)
        yield ast.Constant(not node.value if is_switch else node.value + 1)
    name = type(node).__name__
    for group in map(str.split, OPERATORS.split(", ")):
        if name in group:
            yield from (getattr(ast, other)() for other in group if other != name)


def mutants(path):
    """Of each change of a file: it, the line and the new text."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            negated = [ast.UnaryOp(ast.Not(), value)] * (field == "test")
            for other in (*others(value), *negated):
                setattr(node, field, other)
                lines = (getattr(each, "lineno", None) for each in ast.walk(node))
                yield path, next(filter(None, lines)), ast.unparse(tree)
            setattr(node, field, value)


def run_pytest(*arguments):
    """Pytest's exit code."""
    # Without compiled files, which Python would take for those of the next change.
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    code = subprocess.run([*command, *arguments], capture_output=True).returncode
    assert code not in (4, 5), "No test was found"
    return code


def run(flags):
    paths = sorted(pathlib.Path("keras_norms/ops").absolute().glob("*.py"))
    found = [mutant for path in paths for mutant in mutants(path)]
    sample = random.Random(flags.seed).sample(found, flags.sample)
    print(f"{len(sample)} of {len(found)} changes")
    options = ["--cov=keras_norms/ops", "--cov-context=test", "--cov-report="]
    assert not run_pytest(*options, *flags.tests), "Tests fail without any change"
    lines = coverage.CoverageData(".coverage")
    lines.read()
    for number in flags.only or range(len(sample)):
        path, line, changed = sample[number]
        contexts = lines.contexts_by_lineno(str(path)).get(line, ())
        tests = {context.partition("|")[0] for context in contexts} - {""}
        original = path.read_text()
        path.write_text(changed)
        code = run_pytest(*sorted(tests, reverse=True)) if tests else None
        path.write_text(original)
        outcome = {None: "not run", 0: "survived"}.get(code, "killed")
        print(f"{number}: {path.name}:{line}: {outcome} of {len(tests)}", flush=True)
        if code == 0:
            texts = ast.unparse(ast.parse(original)).splitlines(), changed.splitlines()
            print(*difflib.unified_diff(*texts, n=0, lineterm=""), sep="\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers in the sample")
    parser.add_argument("--tests", nargs="+", default=("tests/ops", "tests/layers"))
    with tempfile.TemporaryDirectory() as directory:
        for name in ("keras_norms", "tests"):
            shutil.copytree(CHECKOUT / name, pathlib.Path(directory, name))
        shutil.copy(CHECKOUT / "pyproject.toml", directory)
        os.chdir(directory)
        run(parser.parse_args())
