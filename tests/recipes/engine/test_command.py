import os
import pathlib
import platform
import subprocess
import sys

import pytest

from tests.support.backend import once

ROOT = pathlib.Path(__file__).parents[3]
PROGRAM = """
import pathlib
from recipes.engine import command, results, settings

def recipe(settings):
    directory = pathlib.Path(settings.runs_dir)
    results.write(directory, "70 \\xb1 1", {})
    return directory

command.run(recipe, settings.Settings)
"""


@once
def test_a_table_where_the_system_takes_ascii_only(tmp_path):
    """Few of the encodings that Windows has know all signs of the tables."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"--runs_dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | ascii_only,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    assert b"70 ? 1" in printed
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == "70 ± 1"


MEMORY = """
import numpy as np
from recipes.engine import command

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

{call}
before, big = resident(), np.ones(2**23)
full = resident() - before
del big
print((resident() - before) / full)
"""


@once
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_stays_with_the_process():
    usual = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}

    def kept(call):
        program = [sys.executable, "-c", MEMORY.format(call=call)]
        return float(subprocess.check_output(program, cwd=ROOT, env=usual))

    assert kept("command.keep_freed_memory()") > 0.9
    assert kept("") < 0.1
