"""Runs the Python of a guide, and writes what it prints and draws next to it.

    python docs/execute.py docs/guides/swap.md

The blocks run one after the other, in an empty folder. What a block prints becomes the
block of text after it, and a figure it saves becomes the picture of that name next to
the page. With `--output=FOLDER`, page and pictures go there.
"""

import argparse
import contextlib
import io
import os
import pathlib
import re
import shutil
import sys
import tempfile

BLOCK = re.compile(r"(```python\n(.*?)```\n)(\n```text\n.*?```\n)?", re.S)


def execute(page, output):
    """Writes a page, with what its blocks print now, and its pictures to a folder."""
    names = {"__name__": "__main__"}

    def run(match):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[2], page.name, "exec"), names)
        lines = printed.getvalue().splitlines()
        # Keras' progress bars are not results.
        text = "\n".join(line.rstrip() for line in lines if "━" not in line).strip("\n")
        return match[1] + (f"\n```text\n{text}\n```\n" if text else "")

    text, output = page.read_text(), output.resolve()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = BLOCK.sub(run, text)
        for picture in pathlib.Path().glob("*.png"):
            shutil.copy(picture, output)
    (output / page.name).write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path)
    arguments = parser.parse_args()
    sys.path.insert(0, os.getcwd())  # a checkout, where guides are run
    execute(arguments.page.resolve(), arguments.output or arguments.page.parent)
