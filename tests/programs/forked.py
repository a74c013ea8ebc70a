"""Ends a run at each of its file operations and at many bytes, and starts it again.

    python -m tests.programs.forked
    python -m tests.programs.forked --disk=<an empty directory on a small file system>

An epoch of this run multiplies an array; what it writes, and how, is as in the recipes.
Each time it is a process that ends: killed before the k-th operation on a file (open,
rename, remove ...); cut by the kernel in the middle of a write, when a file has b
bytes; or failed, as a write fails when a file has b bytes (a limit of the process) or,
with --disk, when the file system is full. Then the same call goes on. All files must
be, byte for byte, those of a run to which nothing happened, and nothing else may be
left. It needs `os.fork`.
"""

import argparse
import errno
import os
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
from functools import partial

import numpy as np

from recipes.engine import files
from tests.programs.damaged import record

EVENTS = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir")


def train(directory):
    """What a recipe does, but for the network."""
    one = record(directory / "run", complete=False, size=1000)
    if one.results is None:
        with one:
            model, state = directory / "models" / "state.npy", one.load()["state"]
            files.sweep(model)
            files.write(model, lambda file: np.save(file, state))
            one.finish({"mean": float(state.mean()), "epochs": len(one.metrics)})


def apart(function, directory):
    """Calls a function in a process of its own; returns its status, or -signal."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            function(directory)
            status = 0
        except OSError as error:
            full = error.errno in (errno.EFBIG, errno.ENOSPC)
            status = 3 if full and "cannot be written" in str(error) else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed(k, directory):
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event in EVENTS and str(directory) in str(arguments[0]):
            count += 1
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train(directory)


def limited(action, size, directory):
    signal.signal(signal.SIGXFSZ, action)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    train(directory)


def filled(left, directory):
    """Trains with so many bytes left on the file system."""
    free = os.statvfs(directory)
    free = free.f_bavail * free.f_frsize
    (directory / "filling").write_bytes(bytes(max(free - left, 0)))
    train(directory)


def content(directory):
    paths = sorted(path for path in directory.rglob("[!.]*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


# How a run ends, by what, with which status, and where: the k-th operation, bytes. The
# largest file, a checkpoint, has 9 kB.
ENDS = [
    ("killed", killed, -signal.SIGKILL, range(1, 1000)),
    ("cut", partial(limited, signal.SIG_DFL), -signal.SIGXFSZ, range(0, 9000, 40)),
    ("failed", partial(limited, signal.SIG_IGN), 3, range(0, 9000, 40)),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="Of so many moments one.")
    parser.add_argument("--disk", type=pathlib.Path, help="Empty, on a small disk.")
    arguments = parser.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory() as root:
        root = pathlib.Path(root)
        assert apart(train, root / "whole") == 0
        expected = content(root / "whole")
        assert len(expected) == 4  # config, metrics, results, model
        disk = [("full", filled, 3, range(0, 40_000, 1024))] if arguments.disk else []
        for kind, function, end, places in ENDS + disk:
            count, directory = 0, arguments.disk if kind == "full" else root / kind
            for place in places[:: arguments.every]:
                status = apart(partial(function, place), directory)
                if status == 0:  # Nothing ends it from here on.
                    break
                (directory / "filling").unlink(missing_ok=True)
                again = apart(train, directory)
                if (status, again, content(directory)) != (end, 0, expected):
                    print("not the same:", kind, place, status, again)
                    wrong = True
                count += 1
                for name in ("run", "models"):
                    shutil.rmtree(directory / name, ignore_errors=True)
            print(f"{kind}: {count} times")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
