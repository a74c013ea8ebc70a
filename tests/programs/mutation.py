"""Mutants of keras_norms/ops, and which of them no test notices.

    pip install cosmic-ray==8.7.0
    KERAS_BACKEND=torch python -m tests.programs.mutation --results=mutants.jsonl

changes one operator, number, condition, call or keyword argument of a file at a time,
in a copy of the checkout, and runs the tests that execute its statement until one of
them fails. The same command with another backend, or with `--again` after tests were
added, runs what survived so far; `--report` prints the table. Results are appended to
`--results`, a line for each mutant and run, so that a run can be ended at any time.

The mutants are those of `tests.programs.mutants`.
A process with Keras and its backend forks for each mutant, so that a run costs what its
tests take. It is one process at a time, with one thread.
"""

import argparse
import collections
import contextlib
import gc
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time

import pytest

from tests.programs.mutants import mutants

CHECKOUT = pathlib.Path(__file__).parents[2]
COPIED = ("keras_norms", "tests", "pyproject.toml")
FILES = tuple(
    f"keras_norms/ops/{name}.py"
    for name in (
        *("custom_gradient", "fused", "lp_norm", "moments", "noise", "normalize"),
        *("passes", "replicas", "spheres", "tensorflow_cpu", "torch_cpu"),
    )
)
TESTS = ("tests/ops", "tests/layers")
_FIRST = 20


class Baseline:
    """Pytest plugin: the lines of the files that each test executes, and its time."""

    def __init__(self, directory):
        self.directory = f"{directory}/"
        self.tests, self.lines = {}, set()

    def trace(self, frame, event, argument):
        path = frame.f_code.co_filename
        if not path.startswith(self.directory) or "/keras_norms/ops/" not in path:
            return None
        path = path.removeprefix(self.directory)

        def local(frame, event, argument):
            self.lines.add((path, frame.f_lineno))
            return local

        return local(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.lines, start = set(), time.process_time()
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            seconds = time.process_time() - start
            self.tests[item.nodeid] = {"seconds": seconds, "lines": sorted(self.lines)}


class Selection:
    """Pytest plugin: runs these tests in this order, notes the first that fails."""

    def __init__(self, tests):
        self.order = {test: i for i, test in enumerate(tests)}
        self.failed = None

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid


def in_child(function, timeout):
    """What `function` returns in a forked process, or "timeout", or "crash"."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(read)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        in_use = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = in_use * resource.getpagesize() + 6 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            answer = json.dumps(function()).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(write)
    timer = threading.Timer(timeout, os.killpg, (child, signal.SIGKILL))
    timer.start()
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    in_time = timer.is_alive()
    timer.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test left running
    os.waitpid(child, 0)
    return json.loads(answer) if answer else "crash" if in_time else "timeout"


def run_pytest(plugin, tests):
    """Run tests in this process, which has imported nothing of the checkout."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "keras_norms")]:
        del sys.modules[name]
    sys.path.insert(0, os.getcwd())
    disabled = ("cacheprovider", "xdist", "unraisableexception", "threadexception")
    options = ["-x", "-q", *(f"-pno:{plugin}" for plugin in disabled)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([*options, "--hypothesis-seed=0", *tests], [plugin])
    origin = sys.modules["keras_norms"].__file__
    assert origin.startswith(os.getcwd()), origin
    return int(code)


def baseline(tests):
    plugin = Baseline(os.getcwd())
    code = run_pytest(plugin, tests)
    if code:
        raise RuntimeError(f"Tests fail without any mutant: pytest returned {code}")
    ours = ("tests", "keras_norms", "__main__")
    return plugin.tests, [n for n in sys.modules if n.split(".")[0] not in ours]


def tests_of(mutant, known, kills, budget, more):
    """Tests that execute the statement of a mutant, those that kill the most first.

    Args:
        budget: Seconds that they may take, without those of the files `more`, which
            come last.
    """

    def executes(test):
        lines = (line for path, line in test["lines"] if path == mutant["file"])
        if mutant["lines"] is None:
            return any(lines)
        first, last = mutant["lines"]
        return any(first <= line <= last for line in lines)

    def order(name):
        return -kills[name], "/ops/" not in name, known[name]["seconds"]

    found = sorted(filter(lambda name: executes(known[name]), known), key=order)
    last = [name for name in found if name.split("::")[0] in more]
    found = [name for name in found if name.split("::")[0] not in more]
    ends = itertools.accumulate(known[name]["seconds"] for name in found)
    return [n for n, end in zip(found, ends) if end <= budget or n == found[0]] + last


def try_mutant(mutant, tests, timeout):
    """The first test that fails, "timeout", "crash", "exit status"; "" if all pass."""
    path = pathlib.Path(mutant["file"])
    original = path.read_text()

    def run():
        # Most mutants need no more than the first ones, and of one file or two.
        for some in (tests[:_FIRST], tests[_FIRST:]):
            plugin = Selection(some)
            files = sorted({test.split("::")[0] for test in some})
            if some and (code := run_pytest(plugin, files)):
                return plugin.failed or f"exit status {code}"
        return ""

    try:
        path.write_text(mutant["code"])
        # Python takes a compiled file for that of a source of the same second.
        try_mutant.clock += 10
        os.utime(path, (try_mutant.clock,) * 2)
        return in_child(run, timeout)
    finally:
        path.write_text(original)
        os.utime(path, (try_mutant.clock + 5,) * 2)


try_mutant.clock = time.time()


def identity(mutant):
    """What a mutant is, wherever its line has moved to."""
    return tuple(mutant[key] for key in ("file", "operator", "old", "new", "nth"))


def read(path):
    """The last result of each mutant, `killed` by any run, in the order of the file."""
    results = {}
    if path.exists():
        for line in path.read_text().splitlines():
            result = json.loads(line)
            before = results.get(identity(result))
            if not before or not before["by"]:
                results[identity(result)] = result
    return results


def report(results):
    """A table, and what survived."""
    rows = collections.defaultdict(list)
    for result in results.values():
        rows[result["file"]].append(result)
    print("| file | mutants | killed | survived |\n|---|--:|--:|--:|")
    for file in (*rows, None):
        tried = [r for r in results.values() if file in (r["file"], None)]
        killed = sum(bool(r["by"]) for r in tried)
        name = pathlib.Path(file).name if file else "all"
        print(f"| {name} | {len(tried)} | {killed} | {len(tried) - killed} |")
    for r in sorted(results.values(), key=lambda r: (r["file"], r["line"])):
        if not r["by"]:
            print(f"\n{r['file']}:{r['line']}: {r['operator']}, {r['tests']} tests")
            print(f"  - {r['old']}\n  + {r['new']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", action="append", help="of keras_norms/ops; all")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--sample", type=int, help="mutants of each file, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="run survivors again")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds of tests of a mutant"
    )
    parser.add_argument("--more", nargs="+", default=(), help="files of tests, last")
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--results", type=pathlib.Path, required=True)
    flags = parser.parse_args()
    flags.results = flags.results.absolute()
    if flags.report:
        report(read(flags.results))
        return

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    for module in ("hypothesis", "keras", backend):
        importlib.import_module(module)
    if backend == "torch":
        sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for name in COPIED:
            source, target = CHECKOUT / name, pathlib.Path(directory, name)
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, target, ignore=ignore)
            else:
                shutil.copy(source, target)
        os.chdir(directory)
        os.environ["PYTHONPATH"] = directory
        run(flags, backend)


def run(flags, backend):
    before = read(flags.results)
    pending = []
    for path in flags.file or FILES:
        found = mutants(path, pathlib.Path(path).read_text())
        if flags.sample:
            random.Random(flags.seed).shuffle(found)
            found = sorted(found[: flags.sample], key=lambda mutant: mutant["line"])
        print(f"{path}: {len(found)} mutants", flush=True)
        for mutant in found:
            result = before.get(identity(mutant))
            survived_elsewhere = result and backend not in result["backend"]
            again = flags.again or survived_elsewhere
            if not result or (again and not result["by"]):
                pending.append(mutant)
    print(f"{len(pending)} to run", flush=True)
    known = in_child(lambda: baseline([*flags.tests, *flags.more]), 1800)
    if isinstance(known, str):
        raise RuntimeError("The tests fail without any mutant")
    known, modules = known
    for module in modules:  # that each mutant's process would import
        if module.split(".")[0] not in {"tensorflow", "jax", "torch"} - {backend}:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    gc.freeze()
    seconds = sum(test["seconds"] for test in known.values())
    print(f"{len(known)} tests take {seconds:.0f} s", flush=True)
    kills = collections.Counter()
    for i, mutant in enumerate(pending):
        tests = tests_of(mutant, known, kills, flags.budget, flags.more)
        expected = sum(known[test]["seconds"] for test in tests)
        start = time.monotonic()
        by = try_mutant(mutant, tests, 30 + 5 * expected) if tests else ""
        kills[by] += 1
        kept = {k: v for k, v in mutant.items() if k not in ("code", "lines")}
        tried = before.get(identity(mutant), {}).get("backend", [])
        kept |= {"backend": sorted({*tried, backend}), "tests": len(tests), "by": by}
        kept["seconds"] = round(time.monotonic() - start, 1)
        with flags.results.open("a") as file:
            file.write(json.dumps(kept) + "\n")
        if not by or not i % 50:
            print(i, kept["file"], kept["line"], kept["old"], "->", kept["new"], by)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
