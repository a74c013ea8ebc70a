"""Scripts of docs/, which is no package."""

import importlib.util
import pathlib

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def script(name):
    """The module of docs/<name>.py."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
