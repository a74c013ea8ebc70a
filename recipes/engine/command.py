"""The command line of a recipe: flags from its settings, its table at the end."""

import contextlib
import ctypes
import signal
import sys
import time

from absl import app, flags

from recipes.engine.errors import UserError

flags.disclaim_key_flags()  # --help of a recipe shows them as its own


def run(recipe, kind):
    """Defines the flags, and calls the recipe with the settings they give.

    Args:
        recipe: Function of the settings. It returns the path of a directory with
            table.md, which is reported, or `None`.
        kind: The class of the settings.
    """
    kind.define_flags()
    # Characters that a terminal or a log cannot show, such as ±, are printed as "?".
    sys.stdout.reconfigure(errors="replace")

    def main(arguments):
        try:
            _refuse(arguments[1:])
            settings = kind.from_flags()
        except ValueError as error:
            sys.exit(f"{error}\nThe same command with --help shows all flags.")
        keep_freed_memory()
        start = time.monotonic()
        try:
            directory = recipe(settings)
        except UserError as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            print("\nInterrupted. Run the same command to continue.", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)  # as shells do
        if directory is not None:
            report(directory)
            print(f"Time     {time.monotonic() - start:.0f} s")

    app.run(main)


def keep_freed_memory():
    """Makes glibc keep what this process frees: the next step needs as much again.

    Otherwise TensorFlow on a CPU returns large tensors to the system in each step, and
    page faults take a good part of it.
    """
    with contextlib.suppress(TypeError, AttributeError):  # Windows; other C libraries
        glibc = ctypes.CDLL(None)
        glibc.mallopt(-4, 0)  # M_MMAP_MAX
        glibc.mallopt(-1, 1_000_000_000)  # M_TRIM_THRESHOLD


def parse(kind, arguments):
    """The settings given by a list of arguments such as `--epochs=3`."""
    values = flags.FlagValues()
    kind.define_flags(values)
    _refuse(values(["recipe", *arguments])[1:])
    return kind.from_flags(values)


def _refuse(arguments):
    """Raises a ValueError if there are arguments that are not flags."""
    if arguments:
        raise ValueError(
            f"Arguments must be flags, --name=value. Received: {arguments}"
        )


def report(directory):
    """Prints the table of a recipe and where its files are."""
    print(f"\n{(directory / 'table.md').read_text(encoding='utf-8')}")
    for path in sorted(directory.glob("[!.]*.png")):
        print(f"Picture  {path}")
    for path in sorted(directory.glob("[!.]*.md")):
        print(f"Table    {path}")
    print(f"Numbers  {directory / 'results.json'}")
