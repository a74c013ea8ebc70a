"""The list of programs that `python -m recipes`, `benchmarks` or `tuner` shows."""

import ast
import pathlib
import sys


def show(main):
    """Prints the programs of a package, each with the first line of its docstring.

    Args:
        main: Path of the `__main__.py` of the package.
    """
    if sys.argv[1:] not in ([], ["--help"]):
        sys.exit(f"It takes no arguments. Received: {sys.argv[1:]}")
    package = pathlib.Path(main).parent
    print("Run one with `python -m` and its name; --help shows its flags.")
    for path in sorted(package.glob("**/*.py")):
        source = path.read_text(encoding="utf-8")
        if path != pathlib.Path(main) and '\nif __name__ == "__main__"' in source:
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__main__")
            line = ast.get_docstring(ast.parse(source)).partition("\n")[0]
            print(f"  {name:36}  {line}")
