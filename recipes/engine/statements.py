"""Exact statements of a paper, claimed and computed, as a table."""

import dataclasses
from typing import NamedTuple

from recipes.engine import results, settings
from recipes.engine.settings import setting


class Statement(NamedTuple):
    """One statement and what came out.

    Attributes:
        item: The paper's number for it, and which form: the name in results.json.
        says: What is computed, with its sizes.
        claimed: What the paper claims for it, as text.
        computed: Float.
        holds: Whether `computed` is as claimed.
    """

    item: str
    says: str
    claimed: str
    computed: float
    holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """How much is drawn; the numbers are the same each time."""

    draws: int = setting(1000, "Random cases of each inequality.", at_least=1)


def write(name, statements, settings):
    """Writes the `Statement`s of a paper; returns the directory."""
    directory, found = settings.directory(name), {}
    for item, says, claimed, computed, holds in statements:
        found[item] = {"computed": float(computed), "holds": bool(holds)}
        found[item] |= {"says": says, "claimed": claimed}
    results.write(directory, table(found), found)
    return directory


def table(found):
    """The Markdown of what is in results.json."""
    rows = []
    for item, of in found.items():
        cells = [item, of["says"], of["claimed"], f"{of['computed']:.3g}"]
        cells.append("yes" if of["holds"] else "no")
        rows.append([cell.replace("|", "\\|") for cell in cells])
    header = ["item", "computed is", "the paper's", "computed", "holds"]
    return results.markdown(header, rows)


def zero(item, says, error, tolerance=1e-9):
    """An identity: its largest relative error is 0, up to rounding."""
    return Statement(item, says, "0", error, error < tolerance)


def at_most_one(item, says, ratios):
    """An inequality: the largest ratio of what it bounds to the bound."""
    largest = float(max(ratios))
    return Statement(item, says, "at most 1", largest, largest <= 1 + 1e-9)
