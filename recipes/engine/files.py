"""Files that are written whole and read with a clear error.

A process may be killed at any moment, the disk may be full, and a file may be damaged.
Then there is still the old file, or an error that names it and says what to do.
"""

import json
import os
import pathlib
import re

import numpy as np

from recipes.engine.errors import UserError


def write(path, save):
    """Calls `save(temporary path)` and renames the file to `path`, whole or not at all.

    Args:
        path: Where to put the file. Missing directories are made.
        save: Callable of one `pathlib.Path`, which has the suffix of `path`.

    Raises:
        UserError: If it cannot be written. The error names the file and the reason.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(temporary)
            # On the disk before it gets the name: power may fail too.
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def write_text(path, text):
    """Writes `text` in UTF-8, which is not the default of every system."""
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def unwritable(path, error):
    """A UserError that names the file that could not be written."""
    return UserError(
        f"{path} cannot be written: {error.strerror or error}. Nothing recorded "
        "before is lost. Fix this, and run the same command again to continue."
    )


def sweep(path):
    """Removes what killed processes left of `path`; no process may be writing it."""
    name = rf"\.{re.escape(path.stem)}-\d+{re.escape(path.suffix)}"
    for left in path.parent.glob(f".*{path.suffix}"):
        if re.fullmatch(name, left.name):
            left.unlink(missing_ok=True)


def write_json(path, value):
    """Writes `value`. NaN and infinities become null, since JSON lacks them."""
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def read_json(path):
    """Reads a dict that `write_json` wrote.

    Raises:
        UserError: If the file is damaged. The error names it.
    """
    try:
        value = json.loads(pathlib.Path(path).read_bytes())
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "it has no keys")
    return value


def damaged(path, reason):
    """A UserError that says what to do about a file that cannot be used."""
    return UserError(
        f"{path} is damaged, or does not belong there: {reason}. Restore it from a "
        f"copy, or delete the directory {pathlib.Path(path).parent} and run the same "
        "command again."
    )


def finite(value):
    """A copy as JSON can hold it: NaN and infinities become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
