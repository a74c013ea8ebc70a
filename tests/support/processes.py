"""Programs that tests start."""

import os
import socket
import subprocess
import sys


def run(*arguments, succeeds=True, **environment):
    """What a Python process with these arguments and variables prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode == 0) is succeeds, done.stderr[-3000:]
    return done.stdout if succeeds else done.stdout + done.stderr


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
