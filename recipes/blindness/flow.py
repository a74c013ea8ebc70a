r"""RealNVP with BN and with LN: real digits and what is between two of them.

The small run, on scikit-learn's 8x8 digits; MNIST averaged to 14x14; and MNIST of full
size with deeper networks, for a GPU:

    python -m recipes.blindness_flow
    python -m recipes.blindness_flow --dataset=mnist --data_dir=<where it is> \
        --train_size=4000 --seeds=2
    python -m recipes.blindness_flow --dataset=mnist --data_dir=<where it is> \
        --size=28 --scales=3 --width=32 --blocks=8 --epochs=100 \
        --architectures=full,shallow,narrow

Claim (Zhou et al., Figures 1 and 3): trained on two digits, RealNVP with LN gives real
images a much higher likelihood than `alpha x1 + (1 - alpha) x2` of an x1 of one digit
and an x2 of the other; with BN it does not tell them apart, for -log p is one formula
for all samples. The paper has curves only, and its text names neither the digits nor
the settings; BN and LN here stand in the networks and between couplings, see
`recipes.flow_steps` for what LN between couplings is.

The second command, digits 0 and 1, took 12 minutes of one core of an Intel Xeon that
other work shared (TensorFlow; the last has not been run). Log-likelihoods of test
images in nats, mean and deviation of 2 seeds:

            real     halfway             gap            AUROC     bits/dim
    BN    -289.3      -485.2      195.9 ± 3.3    0.964 ± 0.003       2.083
    LN    -390.5      -672.9     282.4 ± 17.5    0.975 ± 0.008       2.822

BN does tell them apart, so that the claim does not hold as it stands. Its gap is the
smaller one, and its likelihood is flat between the digits, where that of LN falls to
the middle; but BN is the better flow after these 992 steps. With `--nobetween`, norms
in the networks alone, both have the same gap (205.8 and 205.9, seed 0).

Reference: Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First
and Second Derivatives of the Loss, 2022, Figures 1 and 3.
https://arxiv.org/abs/2205.15146
"""

import itertools
import pathlib

import numpy as np
from absl import app, flags
from tqdm import tqdm

from recipes import data, figures, flow_figures, grid
from recipes.flow_training import ALPHAS, DEFAULTS, changes, complete, train
from recipes.workers import each

# Figure 3; the paper has no numbers for them.
ARCHITECTURES = {
    "full": lambda config: {},
    "shallow": lambda config: {"couplings": max(1, config["couplings"] // 2)},
    "narrow": lambda config: {"width": max(1, config["width"] // 2)},
}


def blindness_flow(
    settings, norm_names, classes, architectures, seeds, workers=None, **places
):
    """Trains a flow for each norm, pair of classes, architecture and seed.

    Args:
        settings: Dict of settings that all runs share, see `complete`.
        norm_names: List of names of `recipes.models.norms`.
        classes: List of pairs of labels.
        architectures: List of names in `ARCHITECTURES`.
        seeds: Integer; seeds go from 0 on.
        workers: As in `recipes.compare.compare`.
        **places: Other arguments of `train`.

    Returns:
        The path of the directory with table.md, results.json, interpolation.png
        (Figures 1 and 3) and training.png.
    """
    shared = complete(settings)
    if unknown := sorted(set(architectures) - ARCHITECTURES.keys()):
        raise ValueError(
            f"Argument `architectures` must be of {', '.join(ARCHITECTURES)}. "
            f"Received: {unknown}"
        )
    cases = list(itertools.product(classes, architectures, norm_names))
    configs = [
        shared
        | ARCHITECTURES[architecture](shared)
        | {"first": pair[0], "second": pair[1], "norm": norm, "seed": seed}
        for pair, architecture, norm in cases
        for seed in range(seeds)
    ]
    # One after the other what has one program.
    programs = len(architectures) * len(norm_names)
    order = sorted(range(len(configs)), key=lambda i: (i // seeds % programs, i))
    trained = [None] * len(configs)
    work = each(train, [configs[i] for i in order], workers, **places)
    for place, outcome in tqdm(work, total=len(configs), unit="run"):
        trained[order[place]] = outcome
    rows, panels = [], {}
    for i, (pair, architecture, norm) in enumerate(cases):
        outcomes = trained[i * seeds : (i + 1) * seeds]
        title = f"{pair[0]} and {pair[1]}"
        rows.append(
            {"classes": title, "architecture": architecture, "norm": norm}
            | summary(outcomes)
        )
        title += "" if len(architectures) == 1 else f", {architecture}"
        panels.setdefault(title, {})[norm] = outcomes
    lists = [f"{a}+{b}" for a, b in classes], norm_names, architectures
    parts = ["blindness_flow", data.stem(shared["dataset"]), *map("_".join, lists)]
    name = "-".join([*parts, f"seeds{seeds}", *changes(shared)])
    directory = pathlib.Path(places.get("runs_dir", "runs")) / name
    grid.write(directory, table(rows), {"rows": rows})
    flow_figures.draw(directory, panels, f"{data.stem(shared['dataset'])}, RealNVP")
    return directory


NATS = ("real", "between", "gap", "batch_gap")
OTHERS = ("auroc", "batch_auroc", "bits_per_dim", "train_bits_per_dim")
MEASURED = (*NATS, *OTHERS)


def summary(outcomes):
    """What several seeds have in common.

    Args:
        outcomes: List of what `train` returned.

    Returns:
        Dict of `seeds`, `diverged` (how many), `round_trip` (the largest) and, for each
        of `MEASURED`, the mean and the deviation over seeds, `None` if all diverged.
    """
    alive = [(r, m) for r, m in outcomes if not r["diverged"]]
    values = {key: [] for key in MEASURED}
    for results, lines in alive:
        mean, middle = results["mean"], len(ALPHAS) // 2
        nats = lines[-1]["train_log_likelihood"]
        # The same dimensions and the same base of the logarithm.
        bits = results["bits_per_dim"] * nats / results["test_log_likelihood"]
        found = results | {
            "real": (mean[0] + mean[-1]) / 2,
            "between": mean[middle],
            "train_bits_per_dim": bits,
        }
        for key in MEASURED:
            values[key].append(found[key])
    return {
        "seeds": len(outcomes),
        "diverged": len(outcomes) - len(alive),
        "round_trip": max((r["round_trip"] for r, _ in alive), default=None),
        **{
            key: {"mean": np.mean(v), "std": np.std(v)} if v else None
            for key, v in values.items()
        },
    }


def table(rows):
    """Returns the rows of `blindness_flow` as Markdown."""
    header = ["digits", "architecture", "norm", "real (nats)", "halfway", "gap"]
    header += ["gap, batch statistics", "AUROC", "AUROC, batch statistics"]
    header += ["test bits/dim", "training bits/dim", "round trip", "diverged"]
    lines = [
        [
            row["classes"],
            row["architecture"],
            figures.NAME_OF.get(row["norm"], row["norm"]),
            *(grid.spread(row[key], 1) for key in NATS),
            *(grid.spread(row[key], 3) for key in OTHERS),
            "–" if row["round_trip"] is None else f"{row['round_trip']:.0e}",
            f"{row['diverged']} of {row['seeds']}",
        ]
        for row in rows
    ]
    return grid.markdown(header, lines)


def main(_):
    values = flags.FLAGS.flag_values_dict()
    named = ("norm", "first", "second", "seed")
    settings = {key: values[key] for key in DEFAULTS if key not in named}
    classes = [tuple(map(int, text.split("+"))) for text in values["classes"]]
    places = {k: values[k] for k in ("pairs", "runs_dir", "data_dir", "download")}
    lists = (values["norms"], classes, values["architectures"], values["seeds"])
    grid.report(blindness_flow(settings, *lists, values["workers"], **places))


def _define_flags():
    sets = f"digits, {', '.join(data.TFDS)}, or the path of an .npz."
    flags.DEFINE_string("dataset", DEFAULTS["dataset"], sets)
    flags.DEFINE_list("norms", ["bn", "layer"], "Names in recipes.models.norms.")
    flags.DEFINE_list("classes", ["0+1"], "Pairs of labels, such as 0+1,3+8.")
    flags.DEFINE_list("architectures", ["full"], f"Of {', '.join(ARCHITECTURES)}.")
    flags.DEFINE_integer("seeds", 3, "How many seeds, from 0 on.", lower_bound=1)
    flags.DEFINE_bool("between", True, "Norms between couplings too, not only inside.")
    for key, text in (
        ("size", "8; of others 14. Images are averaged to this height and width."),
        ("scales", "2."),
        ("couplings", "3. Couplings with one kind of mask."),
        ("width", "32; of others 16. Channels of the networks of s and t."),
        ("blocks", "1. Residual blocks in them."),
        ("epochs", "100; of others 16."),
        ("batch_size", "64."),
        ("train_size", "All. Use so many training images of a pair only."),
        ("pairs", "All. Interpolate so many pairs of test images only."),
        ("workers", "Flows that train at the same time."),
    ):
        flags.DEFINE_integer(key, None, text, lower_bound=1)
    flags.DEFINE_float("learning_rate", None, "1e-3, of Adam.", lower_bound=0)
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
