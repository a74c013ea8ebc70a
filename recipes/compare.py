"""Compares normalisations: CBN learns faster than BN, most of all with sigmoid.

The first comparison, 30 trainings on scikit-learn's 8x8 digits, took 4 minutes and 15
seconds on 2 cores; the second is the paper's, for a GPU and ten seeds:

    python -m recipes.compare --dataset=digits --models=resnet20 --norms=bn,cbn \
        --activations=sigmoid,tanh,relu,selu,swish --seeds=3 --rho=2
    python -m recipes.compare --dataset=cifar10 --data_dir=<where it is> \
        --models=resnet20,vgg16 --seeds=10

Epochs until 90 % test accuracy on digits, and the test accuracy of the last epoch:

    activation       sigmoid        tanh        relu        selu       swish
    BN             7.7  98.1   1.3  97.4   3.3  98.2   2.0  98.3   3.3  98.5
    CBN, rho = 2   1.0  98.1   1.0  97.6   1.0  98.4   1.0  98.9   1.0  98.7

(TensorFlow 2.21, one thread a run; deviations are 0.0 to 0.6 points.) The paper's Table
1, ResNet-20 on CIFAR-10 with 120 epochs, ten seeds and a rho for each activation:

    BN                 79.0       87.6       91.1       89.7       91.2
    CBN                91.2       91.7       92.0       91.6       92.2

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Tables 1-4 and Figures 4-6.
https://doi.org/10.1109/TPAMI.2023.3319005
"""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import pathlib
import signal
import threading

import keras
import numpy as np
from absl import app, flags
from tqdm import tqdm

from recipes import data, experiment, figures
from recipes.train import (
    DEFAULTS,
    changes,
    complete,
    define_shared_flags,
    run_name,
    train,
)

# A network for small images gains little from a second thread, a second run gains all.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "NPROC": "1",  # XLA
    "TF_CPP_MIN_LOG_LEVEL": "3",  # nothing but the progress bar
}
MOST_WORKERS = 8  # each takes about 1 GB


def compare(
    models,
    norms,
    activations,
    seeds,
    config,
    target_accuracy=0.9,
    runs_dir="runs",
    workers=None,
    **places,
):
    """Trains every combination and writes the table and the picture.

    Args:
        models, norms, activations: Lists of names.
        seeds: Integer, each combination is trained with the seeds 0 to `seeds - 1`.
        config: Dict of the other settings of `recipes.train.train`.
        target_accuracy: Float, counts the epochs until the test accuracy reaches it.
        runs_dir: Where the runs, and the comparison, are recorded.
        workers: Integer, how many networks train at the same time, each in its own
            process and with one thread. With 1 they train one after the other in this
            process, with all of the machine. If None, 1 where there is an accelerator,
            else one a core.
        **places: Other arguments of `recipes.train.train`.

    Returns:
        The path of the directory with table.md, results.json and curves.png.
    """
    cells = list(itertools.product(models, activations, norms))
    configs = {
        cell: [
            complete({**config, **_settings(cell), "seed": seed})
            for seed in range(seeds)
        ]
        for cell in cells
    }
    results = _train_all(
        [config for cell in cells for config in configs[cell]],
        workers or _default_workers(),
        runs_dir=runs_dir,
        **places,
    )
    rows, panels = [], {}
    for cell in cells:
        model, activation, norm = cell
        names = [run_name(config) for config in configs[cell]]
        curves = [
            experiment.Run(pathlib.Path(runs_dir) / name, config).metrics
            for name, config in zip(names, configs[cell], strict=True)
        ]
        title = activation if len(models) == 1 else f"{model} {activation}"
        panels.setdefault(title, {})[norm] = curves
        runs = [results[name] for name in names]
        rows.append(
            {
                **_settings(cell),
                **summarise(runs, curves, target_accuracy),
                "runs": runs,
            }
        )
    directory = pathlib.Path(runs_dir) / _name(
        models, norms, activations, seeds, config
    )
    experiment.write_json(
        directory / "results.json", {"target_accuracy": target_accuracy, "rows": rows}
    )
    text = table(rows, target_accuracy)
    experiment.write(directory / "table.md", lambda path: path.write_text(text))
    figures.training_curves(
        directory / "curves.png",
        panels,
        f"{data.stem(config.get('dataset', DEFAULTS['dataset']))}, "
        f"{', '.join(models)}: mean and range of {seeds} runs",
    )
    return directory


def _settings(cell):
    return dict(zip(("model", "activation", "norm"), cell, strict=True))


def _name(models, norms, activations, seeds, config):
    lists = ["+".join(names) for names in (models, norms, activations)]
    config = complete(config)
    parts = [data.stem(config["dataset"]), *lists, f"seeds{seeds}", *changes(config)]
    return "-".join(["compare", *parts])


def _default_workers():
    try:
        devices = keras.distribution.list_devices()
    except AttributeError:  # PyTorch has none
        devices = []
    if any(not device.startswith("cpu") for device in devices):
        return 1
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use
        return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    return min(os.cpu_count(), MOST_WORKERS)


def _train_all(configs, workers, **places):
    """Returns a dict from the name of each run to its results."""
    results = {}

    def collect(result):
        results[result["name"]] = result
        outcome = "diverged" if result["diverged"] else f"{result['test_accuracy']:.1%}"
        progress.set_postfix_str(f"{result['name']}: {outcome}")
        progress.update()

    with tqdm(total=len(configs), unit="run") as progress:
        if workers == 1:
            for config in configs:
                collect(train(config, verbose=0, **places))
            return results
        with concurrent.futures.ProcessPoolExecutor(
            min(workers, len(configs)),
            multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        ) as pool:
            with _environment(WORKER_ENVIRONMENT):  # which the workers inherit
                futures = [pool.submit(train, c, verbose=0, **places) for c in configs]
            try:
                for future in concurrent.futures.as_completed(futures):
                    collect(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return results


@contextlib.contextmanager
def _environment(variables):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start_worker():
    # Ctrl-C ends a worker at once, and so does the end of the process that started it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()

    def follow():
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def summarise(runs, curves, target_accuracy):
    """The numbers of one row: mean and deviation over the runs that did not diverge.

    Args:
        runs: List of the results of `train`, one a seed.
        curves: List of their metrics, each a list with a dict an epoch.
        target_accuracy: Float.

    Returns:
        Dict with `test_accuracy` and `train_loss` (of the last epoch) and
        `seconds_per_step`, each a dict of `mean` and `std` (over n, not n - 1) or
        `None`; `epochs_to_target`, a list with an epoch or `None` a run; `diverged`
        and `seeds`, two counts.
    """
    trained = [run for run in runs if not run["diverged"]]
    return {
        **{
            key: _mean_and_std([run[key] for run in trained])
            for key in ("test_accuracy", "train_loss", "seconds_per_step")
        },
        "epochs_to_target": [
            next((m["epoch"] for m in c if m["test_accuracy"] >= target_accuracy), None)
            for c in curves
        ],
        "diverged": len(runs) - len(trained),
        "seeds": len(runs),
    }


def _mean_and_std(values):
    values = [value for value in values if value is not None]
    if not values:
        return None
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def table(rows, target_accuracy):
    """Returns the rows of `compare` as Markdown."""
    lines = [
        "| model | activation | norm | test accuracy, % | training loss | "
        f"epochs to {target_accuracy:.0%} | ms per step | diverged |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            row["model"],
            row["activation"],
            row["norm"],
            _format(row["test_accuracy"], "{:.2f}", 100),
            _format(row["train_loss"], "{:.4f}", 1),
            _format_epochs(row["epochs_to_target"]),
            _format(row["seconds_per_step"], "{:.1f}", 1000),
            f"{row['diverged']} of {row['seeds']}" if row["diverged"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Mean ± standard deviation over the runs that did not diverge, test accuracy "
        "and training loss (cross-entropy) of the last epoch. A step is one batch of "
        "training, without compilation.",
    ]
    return "\n".join(lines) + "\n"


def _format(value, form, factor):
    if value is None:
        return "–"
    mean, std = (form.format(factor * value[key]) for key in ("mean", "std"))
    return f"{mean} ± {std}"


def _format_epochs(epochs):
    reached = [epoch for epoch in epochs if epoch is not None]
    if not reached:
        return "never"
    mean = f"{np.mean(reached):.1f}"
    if len(reached) == len(epochs):
        return mean
    return f"{mean} ({len(reached)} of {len(epochs)} runs)"


def main(_):
    values = flags.FLAGS.flag_values_dict()
    directory = compare(
        values["models"],
        values["norms"],
        values["activations"],
        values["seeds"],
        {key: values[key] for key in DEFAULTS if key in values},
        **{
            key: values[key]
            for key in (
                "target_accuracy",
                "workers",
                "runs_dir",
                "saved_models_dir",
                "data_dir",
                "download",
            )
        },
    )
    print((directory / "table.md").read_text())
    print(f"Picture  {directory / 'curves.png'}")
    print(f"Table    {directory / 'table.md'}")
    print(f"Models   {pathlib.Path(values['saved_models_dir'])}/*.keras")


if __name__ == "__main__":
    define_shared_flags()
    flags.DEFINE_list("models", ["resnet20"], "resnet8, resnet20, ..., vgg16.")
    flags.DEFINE_list("norms", ["bn", "cbn"], "Normalisations.")
    flags.DEFINE_list(
        "activations",
        ["sigmoid", "tanh", "relu", "selu", "swish"],
        "As Keras calls them.",
    )
    flags.DEFINE_integer("seeds", 3, "How many seeds, from 0 on.", lower_bound=1)
    flags.DEFINE_float("target_accuracy", 0.9, "Count epochs until it.", 0, 1)
    flags.DEFINE_integer(
        "workers", None, "Networks that train at the same time.", lower_bound=1
    )
    app.run(main)
