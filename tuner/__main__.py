"""Lists the searches: `python -m tuner`."""

from recipes.engine import programs

programs.show(__file__)
