"""Files that are written whole and read with a clear error; directories of one process.

A process may be killed at any moment, the disk may be full, and a file may come back
damaged: then there is the old file, or an error that names it and says what to do.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import socket
import time
import warnings

import numpy as np

try:
    import fcntl
except ImportError:  # on Windows nothing is locked
    fcntl = None

PATIENCE = 2.0  # seconds, in which the children of a killed process end too


class InUse(RuntimeError):
    """Another process has the directory."""


def write(path, save):
    """Calls `save(temporary path)` and renames the file to `path`, whole or not at all.

    Args:
        path: Where the file is to be. Missing directories are made.
        save: Callable of one `pathlib.Path`, which has the suffix of `path`.

    Raises:
        OSError: If it cannot be written. The error names the file and the reason.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path, error):
    """An OSError that names the file that could not be written."""
    return OSError(
        error.errno or errno.EIO,
        f"{path} cannot be written: {error.strerror or error}. What was recorded "
        "before is whole, and once this is mended, the same command goes on",
    )


def sweep(path):
    """Removes what killed processes left of `path`, which nobody may be writing."""
    name = rf"\.{re.escape(path.stem)}-\d+{re.escape(path.suffix)}"
    for left in path.parent.glob(f".*{path.suffix}"):
        if re.fullmatch(name, left.name):
            left.unlink(missing_ok=True)


def write_json(path, value, seal=None):
    """Writes `value`, where NaN and infinities become null, as JSON cannot say them.

    Args:
        path: Where the file is to be.
        value: What JSON can say; a dict if there is a seal.
        seal: `None`, or a dict. With a checksum of `value` it becomes the key "seal".
    """
    value = finite(value)
    if seal is not None:
        value = {**value, "seal": {**seal, "content": digest(value)}}
    text = json.dumps(value, indent=2) + "\n"
    write(path, lambda temporary: temporary.write_text(text))


def read_json(path, seal=None):
    """Reads a dict that `write_json` wrote, without its seal.

    Args:
        path: Of the file.
        seal: The dict with which it must have been sealed; `None` if that does not
            matter. A file without a seal, of an earlier version, is read as it is.

    Raises:
        ValueError: If the file is damaged, or sealed otherwise. The error names it.
    """
    path = pathlib.Path(path)
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "it has no keys")
    if "seal" not in value:
        if any(isinstance(v, dict) and "content" in v for v in value.values()):
            raise damaged(path, "its seal has another name")
        return value
    found = value.pop("seal")
    if not isinstance(found, dict) or found.pop("content", None) != digest(value):
        raise damaged(path, "its checksum is wrong")
    if seal is not None:
        compare_seals(path, found, seal)
    return value


def compare_seals(path, found, expected):
    """Raises a ValueError unless the seal of a file, a dict, is the expected one."""
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            then, now = found.get(key), expected.get(key)
            raise damaged(
                path, f"it was written with {key} {then}, and now it is {now}"
            )


def damaged(path, reason):
    """A ValueError that says what to do about a file that cannot be used."""
    return ValueError(
        f"{path} is damaged, or does not belong there: {reason}. Restore it from a "
        f"copy; or delete the directory {path.parent}, and the same command makes it "
        "anew."
    )


def digest(value):
    """Half of the SHA-256 of bytes, or of a value as JSON."""
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(content).hexdigest()[:32]


def finite(value):
    """A copy of what JSON can say, but for NaN and infinities, which become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


_held = {}  # from a directory that this process has to its open lock file


def lock(directory):
    """Takes a directory, which is made, for this process, until `unlock` or its end.

    It has a file `.lock`, which the operating system unlocks whenever and however the
    process ends. On NFS that works where the server has locks; where a file system has
    none, there is a warning.

    Returns:
        Whether the directory was not this process's before.

    Raises:
        InUse: If another process has the directory.
        OSError: If the directory cannot be written.
    """
    path = pathlib.Path(directory) / ".lock"
    key = path.resolve()
    if key in _held:
        if _is(_held[key], path):
            return False
        os.close(_held.pop(key))  # somebody deleted the directory
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise unwritable(path, error) from error
        if not _locks(file, path):
            holder = os.read(file, 1000).decode(errors="replace").strip()
            os.close(file)
            if time.monotonic() >= deadline:
                raise InUse(
                    f"{path.parent} is in use by {holder or 'another process'}. Wait "
                    "until that ends, or give another --name or --runs_dir."
                )
            time.sleep(0.05)
        elif not _is(file, path):  # the process that had it has just removed the file
            os.close(file)
        else:
            break
    _held[key] = file
    about = f"process {os.getpid()} on {socket.gethostname()}\n"
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.write(file, about.encode())
    return True


def _locks(file, path):
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(
            f"{path} cannot be locked: {error.strerror}. No second process may use "
            "this directory.",
            stacklevel=4,
        )
    return True


def _is(file, path):
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def unlock(directory):
    """Leaves a directory to other processes."""
    path = pathlib.Path(directory) / ".lock"
    file = _held.pop(path.resolve(), None)
    if file is not None:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)
