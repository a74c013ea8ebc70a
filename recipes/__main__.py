"""Lists the experiments: `python -m recipes`."""

from recipes.engine import programs

programs.show(__file__)
