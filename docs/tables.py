"""Writes the tables of README.md and docs from the numbers in docs/results.

    python docs/tables.py

A page has a table between two comments; the first says where it comes from:

    <!-- numbers: layer_jax.json -->                 reports of a benchmark, one or more
    <!-- numbers: summary of network_jax.json -->    ratios only, of whole networks
    <!-- numbers: statements_cbn.json -->            the results of a recipe
    <!-- numbers: tuning.json -->                    of tuner.search
    <!-- numbers: the command above -->              what a recipe prints
    <!-- numbers: table 2 of the command above -->   the second table of that
    <!-- numbers: details of the command above -->   its details.md, of which a table
                                                     can be named, too
    ...
    <!-- end -->

A command itself can replace "the command above". JSON files are those of docs/results,
and recipes find their trainings in the archives there: nothing is trained.
"""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- numbers: (.*?) -->\n).*?(<!-- end -->)", re.S)
COMMAND = re.compile(r"^ {4}((?:\w+=\S+ )*python -m recipes\.(?:\\\n|.)*)", re.M)
OF_A_COMMAND = re.compile(
    r"(?:table (\d+) of )?(?:(details) of )?"
    r"(the command above|(?:\w+=\S+ )*python -m recipes\..*)",
    re.S,
)

sys.path.insert(0, str(ROOT))


def sources(text):
    """What the comments of a page name."""
    return [match[2] for match in BLOCK.finditer(text)]


def commands(text):
    """The commands whose tables a page has."""
    found = (_command(match, text) for match in BLOCK.finditer(text))
    return [each[0] for each in found if each]


def written(text, printed=None):
    """A page with its tables filled in.

    Args:
        text: The page.
        printed: What `run` returned; if `None`, tables of commands stay as they are.

    Raises:
        ValueError: If a comment names something that does not exist; it is quoted.
    """

    def table(match):
        try:
            command = _command(match, text)
            if not command:
                return f"{match[1]}\n{compact(of_files(match[2]))}\n\n{match[3]}"
            if printed is None:
                return match[0]
            words, number, file = command
            found = printed[words][file or "table.md"]
            if number:
                found = re.findall(r"(?:^\|.*\n)+", found, re.M)[int(number) - 1]
            return f"{match[1]}\n{compact(found)}\n\n{match[3]}"
        except (OSError, LookupError, ImportError) as error:
            raise ValueError(f"<!-- numbers: {match[2]} -->: {error!r}.") from error

    return BLOCK.sub(table, text)


def _command(match, text):
    """For a block: the command, the number of its table, and its file; or `None`."""
    if not (found := OF_A_COMMAND.fullmatch(match[2])):
        return None
    number, details, command = found.groups()
    if command == "the command above":
        command = COMMAND.findall(text[: match.start()])[-1]
    command = command.replace("<where it is>", "data")  # not read
    command = " ".join(re.sub(r"\\\n|\s#.*", " ", command).split())
    return command, number, details and "details.md"


def of_files(names):
    """The table of the JSON files in docs/results that a comment names."""
    from benchmarks import tables

    table, names = tables.of, names.split()
    if names[:2] == ["summary", "of"]:
        table, names = tables.summary, names[2:]
    reports = [json.loads((RESULTS / name).read_text()) for name in names]
    if "benchmark" in reports[0]:
        return table(*reports)
    if "trials" in reports[0]:
        from tuner import report

        return report.table(reports[0], reports[0]["hyperparameters"])
    # blindness_layers.json is of recipes.blindness.layers.
    name = names[0].removesuffix(".json").replace("_", ".", 1)
    if name.startswith("statements."):
        name = "engine.statements"
    recipe = importlib.import_module(f"recipes.{name}")
    return recipe.table(reports[0].get("rows", reports[0]))


def compact(text):
    """Markdown with narrow tables and lines of a hundred characters."""
    parts = []
    for part in text.strip().split("\n\n"):
        if not part.startswith("|"):
            parts.append(textwrap.fill(part, 100, break_on_hyphens=False))
            continue
        lines = []
        for line in part.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            cells = [re.sub("^:?-+(:?)$", r"--\1", cell) for cell in cells]
            cells = [re.sub("^--$", "---", cell) for cell in cells]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def run(commands):
    """What recipes print, by command: dicts with the text of table.md and others."""
    printed, alike = {}, {}
    for command in dict.fromkeys(commands):
        variables = command.partition("python -m ")[0]
        alike.setdefault(variables, []).append(command)
    with tempfile.TemporaryDirectory() as folder:
        for archive in RESULTS.glob("*.tar.xz"):
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        for variables, of in alike.items():
            words = [f"{folder}/printed.json", f"{folder}/trainings", *of]
            environment = {"KERAS_BACKEND": "tensorflow", "TQDM_DISABLE": "1"}
            environment |= dict(each.split("=") for each in variables.split())
            subprocess.run(
                [sys.executable, __file__, *words],
                env={**os.environ, **environment},
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            printed |= json.loads(pathlib.Path(words[0]).read_text())
    return printed


def print_to(path, runs_dir, *commands):
    """Runs the commands of one backend in this process, which starts only once."""
    from recipes.engine import command, figures, settings

    figures.save = lambda figure, path: None  # which takes longer than all the rest

    def trained():
        return {file.parent.name for file in pathlib.Path(runs_dir).glob("*/metrics*")}

    printed = {}
    for each in commands:
        name, *words = each.partition("python -m ")[2].split()
        module, before = importlib.import_module(name), trained()
        words += [f"--runs_dir={runs_dir}"]
        if issubclass(module.Settings, settings.Sweep):
            words += ["--workers=1"]
        directory = module.run(command.parse(module.Settings, words))
        if new := trained() - before:
            raise SystemExit(f"{each}: no archive has {', '.join(sorted(new))}.")
        texts = {file.name: file.read_text() for file in directory.glob("*.md")}
        printed[each] = texts
    pathlib.Path(path).write_text(json.dumps(printed))


def main():
    texts = {page: page.read_text() for page in PAGES}
    printed = run(each for text in texts.values() for each in commands(text))
    for page, text in texts.items():
        if (now := written(text, printed)) != text:
            page.write_text(now)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    print_to(*sys.argv[1:]) if sys.argv[1:] else main()
