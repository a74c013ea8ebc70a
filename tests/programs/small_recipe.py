"""`python -m tests.programs.small_recipe recipes.train ...` has the tests' network."""

import runpy
import sys

from recipes import models
from tests.support import small

if __name__ == "__main__":
    models.build = small.convolutions
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
