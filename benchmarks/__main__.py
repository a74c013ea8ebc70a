"""Lists the benchmarks: `python -m benchmarks`."""

from recipes.engine import programs

programs.show(__file__)
