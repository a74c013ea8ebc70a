"""The tables of benchmarks, of the reports that they write with --output.

The terminal and the pages of docs/results have them from here: `python docs/tables.py`
writes those of the JSON files there. Nothing but the standard library is imported.
"""

from benchmarks.tables import costs, results
from benchmarks.tables.text import markdown

__all__ = ["markdown", "of", "summary"]

_TABLES = costs.TABLES | results.TABLES
_SUMMARIES = costs.SUMMARIES | results.SUMMARIES


def of(*reports):
    """The Markdown of one report, or of several of one benchmark together."""
    return _TABLES[reports[0]["benchmark"]](*reports)


def summary(*reports):
    """What reports of one benchmark say in the fewest numbers, as Markdown."""
    return _SUMMARIES[reports[0]["benchmark"]](*reports)
