"""Scripts of docs/, which is not a package."""

import pathlib
import runpy
import types

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def script(name):
    """What docs/<name>.py defines."""
    return types.SimpleNamespace(**runpy.run_path(DOCS / f"{name}.py"))
