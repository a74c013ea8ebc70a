"""`python -m tests.programs.small_recipe recipes.train ...` has the tests' network."""

import runpy
import sys

from recipes import models
from recipes.models import norms
from tests.support import tiny


def build(model, input_shape, num_classes, norm, activation, dtype=None):
    norm = norms.get(norm) if isinstance(norm, str) else norm
    return tiny.build(model, input_shape, num_classes, norm, activation)


if __name__ == "__main__":
    models.build = build
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
