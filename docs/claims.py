"""Writes docs/claims.md from docs/claims.txt.

    python docs/claims.py

A line of the text that begins with "| " is a row: item, what the paper says, the result
here, at what size, agreement, pages, and the command. In the third and fourth,
`{file.json:key}` is the number that docs/results/file.json has for the key, and
`{0.123}` must be on one of the row's pages, as must the command of what was run; the
page's environment variables come before it. `{counts}` is the number of rows by paper
and agreement. All other text is copied.
"""

import collections
import json
import pathlib
import re

DOCS = pathlib.Path(__file__).parent
HEADER = ("item", "the paper", "here", "size here", "agreement", "where", "command")
AGREEMENT = ("holds", "holds partly", "does not hold", "never run")
NUMBER = re.compile(r"\{([^{}]*)\}")


def rows(text):
    """Yields the heading and the cells of each row."""
    heading = None
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| "):
            yield heading, [cell.strip() for cell in line.strip("| ").split(" | ")]


def written(text):
    """The page for a text. A ValueError names the row with an error."""

    def of_rows(match):
        lines = [HEADER, ["---"] * len(HEADER)]
        lines += [_checked(cells) for _, cells in rows(match[0])]
        return "".join(f"{_row(cells)}\n" for cells in lines)

    page = re.sub(r"(?:^\| .*\n?)+", of_rows, text, flags=re.M)
    counts = collections.Counter()
    for heading, cells in rows(text):
        counts.update([(heading, cells[4]), ("all", cells[4])])
    return page.replace("{counts}", _table(counts))


def _row(cells):
    return f"| {' | '.join(cells)} |"


def _checked(cells):
    """The cells of a row as the page has them."""
    item = cells[0]
    if len(cells) != len(HEADER):
        raise ValueError(f"{item}: {len(cells)} cells, not {len(HEADER)}.")
    *texts, agreement, where, command = cells
    if agreement not in AGREEMENT:
        raise ValueError(f"{item}: no such agreement, {agreement!r}.")
    places = [] if where == "-" else where.split(", ")
    pages, shown = "", []
    for place in places:
        tested = place.startswith("tests/")
        path = DOCS.parent / place if tested else DOCS / "results" / f"{place}.md"
        if not path.is_file():
            raise ValueError(f"{item}: there is no {path.relative_to(DOCS.parent)}.")
        shown.append(f"`{place}`" if tested else f"[{place}](results/{place}.md)")
        pages += path.read_text()

    def number(match):
        file, _, key = match[1].partition(":")
        if key:
            stored = json.loads((DOCS / "results" / file).read_text())
            if key not in stored:
                raise ValueError(f"{item}: {file} has no {key!r}.")
            return f"{stored[key]['computed']:.3g}"
        if not re.search(rf"(?<![\d.]){re.escape(file)}(?![\d])", pages):
            raise ValueError(f"{item}: {file} does not stand in {where}.")
        return file

    texts = [NUMBER.sub(number, text) for text in texts]
    if command != "-":
        module = command.split(" ")[0]
        if not (DOCS.parent / f"{module.replace('.', '/')}.py").is_file():
            raise ValueError(f"{item}: there is no {module}.")
        written = re.sub(r"\\\n +", "", pages).replace("<where it is>", "DIR")
        command = f"python -m {command}"
        found = re.findall(rf"^ +((?:\w+=\S+ )*{re.escape(command)})$", written, re.M)
        if not found and agreement != "never run" and "](" in "".join(shown):
            raise ValueError(f"{item}: {command} does not stand in {where}.")
        command = f"`{found[0] if found else command}`"
    return [*texts, agreement, ", ".join(shown) or "-", command]


def _table(counts):
    papers = dict.fromkeys(heading for heading, _ in counts if heading != "all")
    lines = [["paper", *AGREEMENT, "all"], ["---"] + ["--:"] * (len(AGREEMENT) + 1)]
    for heading in (*papers, "all"):
        found = [counts[heading, each] for each in AGREEMENT]
        name = heading.partition(":")[0]
        lines.append([name, *map(str, [*found, sum(found)])])
    return "\n".join(map(_row, lines))


if __name__ == "__main__":
    page = written((DOCS / "claims.txt").read_text())
    (DOCS / "claims.md").write_text(page)
