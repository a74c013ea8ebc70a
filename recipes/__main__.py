"""Lists the experiments: `python -m recipes`."""

import ast
import pathlib

HERE = pathlib.Path(__file__).parent

print("Run one with `python -m` and its name; --help shows its flags.")
for path in sorted([*HERE.glob("[!_]*.py"), *HERE.glob("*/[!_]*.py")]):
    source = path.read_text()
    if '__name__ == "__main__"' in source:
        name = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        line = ast.get_docstring(ast.parse(source)).partition("\n")[0]
        print(f"  {name:36}  {line}")
