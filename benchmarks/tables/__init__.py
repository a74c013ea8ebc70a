"""The tables of benchmarks, from the reports that they write with --output.

The terminal and the pages of docs/results get them from here: `python docs/tables.py`
writes those of the JSON files there. Only the standard library is imported.
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
    """A summary of reports of one benchmark in few numbers, as Markdown."""
    return _SUMMARIES[reports[0]["benchmark"]](*reports)
