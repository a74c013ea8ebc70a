"""Compares normalisations: CBN learns faster than BN, most of all with sigmoid.

The first comparison, 30 trainings on scikit-learn's 8x8 digits, took 4 minutes and 15
seconds on 2 cores; the second is the paper's, for a GPU and ten seeds; the third is the
same with the ten seeds of a combination trained together, in one program (JAX, for an
accelerator: on a CPU it is slower than one by one; batches come in another order):

    python -m recipes.compare --dataset=digits --models=resnet20 --norms=bn,cbn \
        --activations=sigmoid,tanh,relu,selu,swish --seeds=3 --rho=2
    python -m recipes.compare --dataset=cifar10 --data_dir=<where it is> \
        --models=resnet20,vgg16 --seeds=10
    KERAS_BACKEND=jax python -m recipes.compare --dataset=cifar10 \
        --data_dir=<where it is> --models=resnet20,vgg16 --seeds=10 --population=10

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

import itertools
import pathlib

from absl import app, flags
from tqdm import tqdm

from recipes import data, experiment, figures, together
from recipes.models import NAMES
from recipes.settings import DEFAULTS, changes, complete, run_name
from recipes.summary import summarise, table
from recipes.train import define_shared_flags, train
from recipes.workers import each


def compare(
    models,
    norms,
    activations,
    seeds,
    config,
    target_accuracy=0.9,
    runs_dir="runs",
    workers=None,
    population=None,
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
        population: Integer, how many seeds of one combination are trained together in
            one program, on JAX, see `recipes.together`. If None, each is trained by
            `recipes.train`.
        **places: Other arguments of `recipes.train.train`.

    Returns:
        The path of the directory with table.md, results.json and curves.png.
    """
    cells = list(itertools.product(models, activations, norms))
    describe = complete if population is None else together.describe
    configs = {
        cell: [
            describe({**config, **_settings(cell), "seed": seed})
            for seed in range(seeds)
        ]
        for cell in cells
    }
    places["runs_dir"] = runs_dir
    if population is None:
        listed = [config for cell in cells for config in configs[cell]]
        results = _train_all(listed, workers, **places)
    else:
        results = _train_together(configs.values(), population, **places)
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
        models, norms, activations, seeds, describe(config)
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
    parts = [data.stem(config["dataset"]), *lists, f"seeds{seeds}", *changes(config)]
    return "-".join(["compare", *parts])


def _train_all(configs, workers, **places):
    """Returns a dict from the name of each run to its results."""
    results = {}
    with tqdm(total=len(configs), unit="run") as progress:
        for _, result in each(train, configs, workers, verbose=0, **places):
            results[result["name"]] = result
            show(progress, result)
    return results


def show(progress, result):
    """Moves a progress bar on by a run."""
    outcome = "diverged" if result["diverged"] else f"{result['test_accuracy']:.1%}"
    progress.set_postfix_str(f"{result['name']}: {outcome}")
    progress.update()


def _train_together(groups, size, **places):
    """The same as `_train_all`, for groups of configs, `size` of a group at a time."""
    results = {}
    with tqdm(total=sum(map(len, groups)), unit="run") as progress:
        for group in groups:
            for first in range(0, len(group), size):
                found = together.train(group[first : first + size], **places)
                results |= {result["name"]: result for result in found}
                progress.set_postfix_str(f"{found[-1]['name']} and before")
                progress.update(len(found))
    return results


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
                "population",
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
    flags.DEFINE_list("models", ["resnet20"], NAMES)
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
    flags.DEFINE_integer(
        "population", None, "Seeds in one program, on JAX.", lower_bound=1
    )
    app.run(main)
