"""Cells and tables of Markdown that all benchmarks share."""

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}


def markdown(header, rows, left=1):
    """A Markdown table of a list of column names and lists of cells.

    Args:
        header: List of the names of columns.
        rows: List of lists of cells, which `str` turns into text. Columns with only
            empty cells are left out.
        left: How many columns are text; the others are aligned right.
    """
    columns = [
        (name, "---" if i < left else "--:", *map(str, cells))
        for i, (name, *cells) in enumerate(zip(header, *rows, strict=True))
    ]
    columns = [column for column in columns if any(column[2:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def spread(row, digits=3):
    """The text of a row's ratio, with its quartiles."""
    low, high = row["ratio_quartiles"]
    return f"{row['ratio']:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def rows_of(reports):
    return [row for report in reports for row in report["rows"]]
