"""`python -m tuner.search` with the small network of the tests."""

import runpy

from recipes import models
from tests.support import small

if __name__ == "__main__":
    models.build = small.build
    runpy.run_module("tuner.search", run_name="__main__")
