"""Tables of what norms cost: times, memory, bytes, kernels, collectives."""

import math

from benchmarks.tables.text import BACKENDS, markdown, rows_of, spread


def layer(*reports):
    """A line for each input: the yardstick's time, and ratios to it."""
    lines, several = {}, len(reports) > 1
    names = list(dict.fromkeys(row["layer"] for row in rows_of(reports)))
    yardstick = names[0]
    for report, row in ((of, row) for of in reports for row in of["rows"]):
        backend = f", {BACKENDS[report['backend']]}" * several
        line = lines.setdefault(f"{row['shape']} {row['dtype']}{backend}", {})
        line[row["layer"]] = spread(row, 2)
        if row["layer"] == yardstick:
            line[yardstick] = f"{row['milliseconds']:.2f}"
            # Kernels have no floor, and the bandwidth is that of the host.
            floor = row["floor_milliseconds"] if report["device"] == "cpu" else 0
            line["floor"] = f"{floor:.2f}" if floor else ""
    header = ["input", "floor, ms", f"{yardstick}, ms", *names[1:]]
    columns = ["floor", *names]
    cells = [
        [key, *(line.get(name, "") for name in columns)] for key, line in lines.items()
    ]
    return markdown(header, cells)


def sweep(*reports):
    """How often CBN is slower, and a line for each shape with both phases' ratios."""
    found, lines = {}, {}
    for row in rows_of(reports):
        phase, shape = row["phase"], "x".join(map(str, row["shape"]))
        key = f"10^{round(math.log10(row['elements']))}", shape
        line = lines.setdefault(key, {})
        line[f"{phase}: bn, ms"] = f"{row['bn']['milliseconds']:.3g}"
        for form in ("decoupled", "coupled"):
            line[f"{phase}: {form}"] = spread(row[form], 2)
            found.setdefault(phase, []).append(row[form]["ratio"])
    slower = " and in ".join(
        f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} cells of {phase}"
        for phase, ratios in found.items()
    )
    forms = ("bn, ms", "decoupled", "coupled")
    columns = [f"{phase}: {form}" for phase in found for form in forms]
    cells = [[*key, *map(line.get, columns)] for key, line in lines.items()]
    table = markdown(["elements", "shape", *columns], cells, left=2)
    return f"CBN is slower in {slower}.\n\n{table}"


def network(*reports):
    """A line a network and norm."""
    cells = []
    for report in reports:
        # The bandwidth is that of the host.
        on_cpu = report["device"] == "cpu"
        bandwidth = 1e9 * report["copy_gigabytes_per_second"]
        for row in report["rows"]:
            passes = row["bytes_of_passes"] / bandwidth
            cells.append(
                [
                    f"{row['network']}, {row['batch']} x {row['image_size']}",
                    row["norm"],
                    f"{row['seconds_per_step']:#.3g}",
                    f"{row['images_per_second']:,.0f}",
                    spread(row, 2),
                    f"{passes:.2g}" if on_cpu else "",
                ]
            )
    header = ["network", "norm", "s/step", "images/s", "ratio to bn (quartiles)"]
    return markdown([*header, "passes, s"], cells, left=2)


_NETWORKS = {
    "resnet20": "ResNet-20",
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
    "efficientnetb0": "EfficientNet-B0",
    "mobilenetv2": "MobileNetV2",
    "densenet121": "DenseNet-121",
}
_NORMS = {"cbn": "CBN", "fused_cbn": "FusedCBN", "none": "no norm"}


def _network_summary(*reports):
    """A line for each network and machine: step time over BatchNormalization's."""
    lines = {}
    for report in reports:
        place = report["device"].removeprefix("NVIDIA ").split()[0]
        if place == "cpu":
            maker = report["processor"].partition(" ")[0].removesuffix("(R)")
            place = f"{report['cores']} {maker} cores"
        place += f", {BACKENDS[report['backend']]}"
        policy = report["dtype_policy"].removeprefix("mixed_")
        for row in report["rows"]:
            size = f"{row['image_size']}x{row['image_size']}"
            name = f"{_NETWORKS[row['network']]}, {row['batch']} images of {size}"
            name += f", {policy}" * (policy != "float32")
            lines.setdefault((name, place), {})[row["norm"]] = f"{row['ratio']:.2f}"
    cells = [
        [*key, *(of.get(norm, "–") for norm in _NORMS)] for key, of in lines.items()
    ]
    return markdown(["network, batch", "where", *_NORMS.values()], cells, left=2)


def memory(*reports):
    """A line a network and norm."""
    cells = []
    for row in rows_of(reports):
        name, size, batch = row["network"].split(":")
        keys = ("peak_bytes", "temporary_bytes", "bytes_per_image")
        values = [f"{row[key] / 1e6:.3g}" if key in row else "" for key in keys]
        ratio = f"{row['ratio']:.2f}"
        cells.append([f"{name}, {batch} x {size}", row["norm"], *values, ratio])
    header = ["network", "norm", "peak, MB", "temporary, MB", "MB an image"]
    return markdown([*header, "ratio to bn"], cells, left=2)


def amat(*reports):
    """A line for each source of the learning rate."""
    header = ["rate", "s/step", "AMAT, us", "direct share"]
    header += ["with / without AMAT (quartiles)", "interval of the median"]
    cells = [
        [
            row["rate"],
            f"{row['seconds_per_step']:#.3g}",
            f"{1e6 * row['amat_seconds']:.3g}",
            f"{row['direct_share']:.3%}",
            spread(row),
            "{:.3f} - {:.3f}".format(*row["ratio_interval"]),
        ]
        for row in rows_of(reports)
    ]
    return markdown(header, cells)


def deployment(*reports):
    """A line for each network, norm and format."""
    header = ["network", "norm", "format", "MB", "error: rms", "largest", "same class"]
    cells = [
        [
            *(row["network"], row["norm"], row["format"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['error']:.1e}",
            f"{row['largest_error']:.1e}",
            f"{row['same_class']:.1%}",
            f"{row['accuracy']:.1%}",
            f"{row['milliseconds']:.2f}",
            spread(row, 2),
        ]
        for row in rows_of(reports)
    ]
    return markdown([*header, "accuracy", "ms", "time (quartiles)"], cells, left=3)


def _ratios(row, rows, place, count):
    """Bytes, memory and a count of a row over those of `bn` at the same place, as text.

    The last item is the bytes over those of `none`.
    """
    costs = {other["norm"]: other for other in rows if other[place] == row[place]}
    pairs = [(key, "bn") for key in ("gigabytes_moved", "temporary_gigabytes", count)]
    pairs.append(("gigabytes_moved", "none"))
    return [
        f"{row[key] / costs[norm][key]:.3f}" if costs.get(norm, {}).get(key) else ""
        for key, norm in pairs
    ]


def _gigabytes(rows):
    """The unit for some costs: its name, its size in GB, its digits."""
    small = max(row["gigabytes_moved"] for row in rows) < 1
    return ("MB", 1e-3, 1) if small else ("GB", 1, 2)


def gpu(*reports):
    """A line for each norm, and for each number of GPUs if there are several."""
    rows, cells = rows_of(reports), []
    unit, size, digits = _gigabytes(rows)
    for row in rows:
        alone = row["gpus"] == "1x1x1"
        cells.append(
            [
                row["norm"],
                "" if alone else row["gpus"],
                f"{row['gigabytes_moved'] / size:.{digits}f}",
                f"{row['temporary_gigabytes'] / size:.{digits}f}",
                row["kernels"],
                row["small_kernels"],
                "" if alone else row["all_reduces"],
                *_ratios(row, rows, "gpus", "kernels"),
            ]
        )
    header = ["norm", "GPUs", f"moved, {unit}", f"temporary, {unit}", "kernels"]
    header += ["under 1 MB", "all-reduces", "moved / bn", "temporary / bn"]
    return markdown([*header, "kernels / bn", "moved / none"], cells)


def tpu(*reports):
    """A line for each slice and norm."""
    rows = rows_of(reports)
    unit, size, digits = _gigabytes(rows)
    cells = [
        [
            row["slice"],
            row["norm"],
            f"{row['gigabytes_moved'] / size:.{digits}f}",
            f"{row['temporary_gigabytes'] / size:.{digits}f}",
            row["all_reduces"],
            *_ratios(row, rows, "slice", "all_reduces"),
        ]
        for row in rows
    ]
    header = ["slice", "norm", f"moved, {unit}", f"temporary, {unit}", "all-reduces"]
    header += ["moved / bn", "temporary / bn", "all-reduces / bn", "moved / none"]
    return markdown(header, cells, left=2)


def tpu_check(*reports):
    """A line for each network, norm and slice."""
    header = ["network", "norm", "slice", "memory, GB", "of the chip's"]
    header += ["operations, TFLOP", "moved, GB", "collectives", "their bytes, MB"]
    header += ["chip, ms", "collectives, ms", "efficiency"]
    cells = [
        [
            row["network"],
            row["norm"],
            row["slice"],
            f"{row['memory_gigabytes']:.2f}",
            f"{row['memory_share']:.0%}",
            f"{row['gigaflops'] / 1e3:.2f}",
            f"{row['gigabytes_moved']:.2f}",
            ", ".join(f"{n} {kind}" for kind, n in row["collectives"].items())
            or "none",
            f"{row['collective_megabytes']:.1f}",
            f"{row['chip_milliseconds']:.2f}",
            f"{row['collective_milliseconds']:.2f}",
            f"{row['efficiency']:.3f}",
        ]
        for row in rows_of(reports)
    ]
    return markdown(header, cells, left=3)


def inference(*reports):
    """A line for each network: its time without norms, and ratios to it."""
    lines = {}
    for report, row in ((of, row) for of in reports for row in of["rows"]):
        key = row["network"], BACKENDS[report["backend"]]
        line = lines.setdefault(key, {})
        line[row["form"]] = spread(row, 2)
        line["ms"] = line.get("ms", f"{row['milliseconds']:.2f}")
        line["shifts"] = row["shifts_that_stay"]
    names = ["BatchNormalization", "BatchNormalization, folded", "CBN", "CBN, folded"]
    columns = ["ms", *names, "shifts"]
    cells = [[*key, *map(line.get, columns)] for key, line in lines.items()]
    header = ["network, batch", "backend", "no norm, ms", "BN", "BN, folded"]
    return markdown([*header, "CBN", "CBN, folded", "its shifts"], cells, left=2)


def probe(*reports):
    """A line for each network."""
    cells = [
        [
            f"{row['network']}, {row['norm']}",
            f"{row['step_milliseconds']:.0f}",
            f"{row['probe_milliseconds']:.0f}",
            f"{row['probe_milliseconds'] / row['step_milliseconds']:.1f}",
            "{:.1%} ({:.1%} - {:.1%})".format(row["share"], *row["share_quartiles"]),
            f"{row['compile_seconds']:.1f}",
        ]
        for row in rows_of(reports)
    ]
    header = ["network", "step, ms", "probe, ms", "in steps"]
    return markdown([*header, "share of training (quartiles)", "first probe, s"], cells)


SUMMARIES = {"network": _network_summary}
_OF = [layer, sweep, network, memory, amat, deployment, inference, probe]
TABLES = {of.__name__: of for of in (*_OF, gpu, tpu, tpu_check)}
