"""Tables of what norms compute: errors, accuracies, what convert and fold leave."""

from benchmarks.tables.text import BACKENDS, markdown, rows_of


def _limited(value, limit):
    """A difference as text, bold if it is over its limit."""
    text = f"{value:.1e}" if value else "0"
    return text if value <= limit else f"**{text}**"


def _left(layers):
    """How many norms, and shifts, are left; empty if none."""
    norms, shifts = layers
    return ", ".join(
        f"{n} {kind}" for n, kind in ((norms, "BN"), (shifts, "shifts")) if n
    )


def applications(*reports):
    """A line for each model: what convert and fold change, and what fold leaves."""
    cells = []
    for report in reports:
        limits = {"preserve": report["preserve_limit"], "fold": report["fold_limit"]}
        for row in report["rows"]:
            norms = row["norms"]

            def largest(key, *names, norms=norms, limits=limits):
                return _limited(max(norms[name][key] for name in names), limits[key])

            cells.append(
                [
                    f"{row['model']}, {row['input']}",
                    f"{row['BatchNormalization']}, {norms['cbn']['CBN']}",
                    f"{row['spread']:.1e}",
                    f"{row['rounding']:.1e}",
                    largest("preserve", "cbn"),
                    # WS and CWN remove the mean of a kernel, and preserve nothing.
                    largest("preserve", "noisy_bn", "lp_norm", "wn"),
                    _limited(row["fold"], limits["fold"]),
                    largest("fold", "cbn"),
                    largest("fold", "noisy_bn", "lp_norm", "cwn", "wn"),
                    largest("fold", "ws"),
                    _left(row["stay"]),
                    _left(norms["cbn"]["stay"]),
                ]
            )
    header = ["model, input", "layers: BN, CBN", "spread", "own rounding"]
    header += ["converted: CBN", "others", "folded: original", "CBN", "others", "WS"]
    return markdown([*header, "left: original", "left: CBN"], cells)


def hub(*reports):
    """A line for each network: what convert and fold change, and what they leave."""
    cells = []
    for report in reports:
        preserved, folded = report["preserve_limit"], report["fold_limit"]
        for row in report["rows"]:
            cells.append(
                [
                    row["network"],
                    f"{row['BatchNormalization']}, {row['CBN']}",
                    f"{row['spread']:.1e}",
                    _limited(row["preserve"], preserved),
                    # If all are 0, the column is left out.
                    row["left"] or "",
                    _limited(row["load"], 0) if row["load"] else "",
                    _limited(row["fold"], folded),
                    _limited(row["CBN fold"], folded),
                    row["stay"] or "",
                    row["CBN stay"] or "",
                    f"{row['seconds']:.1f}",
                ]
            )
    header = ["network", "layers: BN, CBN", "spread", "converted", "BN left", "loaded"]
    header += ["folded: original", "folded: CBN", "BN left: original", "BN left: CBN"]
    return markdown([*header, "convert, s"], cells)


def groups(*reports):
    """A line for each group size: mean and deviation over the seeds."""
    cells = [
        [
            row["group_size"] or "whole batch",
            f"{row['mean']:.2f} +- {row['deviation']:.2f}",
        ]
        for row in rows_of(reports)
    ]
    return markdown(["group_size", "test accuracy, %"], cells)


_FORMS = {
    "keras BN": ["keras BN"],
    "CBN": ["CBN", "CBN, ratio"],
    "CBN, coupled or rate unknown": [
        "CBN, coupled",
        "CBN, coupled, ratio",
        "CBN, rate unknown",
    ],
    "NoisyBN": ["NoisyBN"],
    "LpNorm, p = 2": ["LpNorm 2", "LpNorm 2, centered"],
    "LpNorm, p = 1 and inf": [
        "LpNorm 1",
        "LpNorm 1, centered",
        "LpNorm inf",
        "LpNorm inf, centered",
    ],
    "WS, CWN, WN": ["WS", "CWN", "WN"],
}


def _largest_errors(rows):
    """The largest errors of output and gradient, as text."""
    values = [[row[key] for row in rows] for key in ("output", "gradient")]
    return ", ".join(
        "inf" if None in each else f"{max(each):.0e}" for each in values if each
    )


def numerics(*reports):
    """A line for each input, with the largest errors over all forms of a layer."""
    rows = rows_of(reports)
    cells = [
        [
            inputs,
            *(
                _largest_errors(
                    [r for r in rows if r["inputs"] == inputs and r["layer"] in layers]
                )
                for layers in _FORMS.values()
            ),
        ]
        for inputs in dict.fromkeys(row["inputs"] for row in rows)
    ]
    return markdown(["inputs", *_FORMS], cells)


# Inputs on which float32 can be exact, those of the second list not for kernels.
_PLAIN = ["mean 0, deviation 1", "mean / deviation = 1e2", "constant"]
_PLAIN += [f"deviation 1e{power}" for power in (-18, -9, 9, 17)]
_NO_KERNELS = ["denormal", "one sample"]
_NO_KERNELS += ["2^20 a channel", "2^24 a channel", "10^6 rows"]


def _numerics_summary(*reports):
    """A line for each layer, a column for each backend: largest error, plain inputs."""
    lines = {}
    for report in reports:
        layers = {}
        for row in report["rows"]:
            of_weights = row["layer"] in _FORMS["WS, CWN, WN"]
            if row["inputs"] in _PLAIN + _NO_KERNELS * (not of_weights):
                layers.setdefault(row["layer"], []).append(row)
        for layer, rows in layers.items():
            lines.setdefault(layer, [layer]).append(_largest_errors(rows))
    backends = [BACKENDS[report["backend"]] for report in reports]
    return markdown(["layer", *backends], lines.values())


_ERRORS = ("outputs", "gradients", "state")


def devices(*reports):
    """A line for each layer: by backend its devices, the largest error, collectives."""
    lines = {}
    for row in rows_of(reports):
        lines.setdefault(row["layer"], [row["layer"]])
    header = ["layer"]
    for report in reports:
        backend = BACKENDS[report["backend"]]
        header += [f"{backend}: devices", "error", "collectives"]
        for layer, cells in lines.items():
            rows = [row for row in report["rows"] if row["layer"] == layer]
            errors = [row[key] for row in rows for key in _ERRORS]
            counts = dict.fromkeys(f"{row['collectives']:g}" for row in rows)
            cells += [
                ", ".join(str(row["devices"]) for row in rows),
                f"{max(errors):.0e}" if errors else "",
                ", ".join(counts),
            ]
    return markdown(header, lines.values())


SUMMARIES = {"numerics": _numerics_summary}
TABLES = {of.__name__: of for of in (applications, hub, groups, numerics, devices)}
