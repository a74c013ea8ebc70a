"""Packages that some diagnostics need, and the others do not."""

import importlib
from typing import Any


def optional(module: str, what: str, package: str) -> Any:
    """Import a module of a package that `what` needs.

    Raises:
        ModuleNotFoundError: If it is not there; the error says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{what} needs {package}: pip install {package.lower()}", name=error.name
        ) from error
