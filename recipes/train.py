r"""Trains one network with one normalisation, as in Section 6.1 of the CBN paper.

The small run, on scikit-learn's 8x8 digits, takes half a minute on 2 cores (less with
the default of 15 epochs). The paper's run needs a GPU:

    python -m recipes.train --dataset=digits --model=resnet20 --norm=cbn \
        --activation=sigmoid --rho=1 --omega=10 --epochs=30 --seed=0
    python -m recipes.train --dataset=cifar10 --data_dir=<where it is> --norm=cbn

ImageNet, with the paper's settings (`recipes.engine.imagenet` says how to get it):

    python -m recipes.train --dataset=imagenet2012 --data_dir=<where it is> \
        --model=resnet50 --norm=cbn --activation=relu --dtype=mixed_bfloat16

With sigmoid and seed 0, the small run passes 90 % test accuracy in epoch 2 and ends at
98.9 %; with `--norm=bn`, in epoch 7 and at 98.6 %. `recipes.compare` has means over
several seeds, and the paper's table.

The same command continues an interrupted run, with the same batches. On one machine
with the same number of threads, the result is that of an uninterrupted run.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import functools

from recipes.engine import classifier, command, devices, training
from recipes.engine.settings import setting
from recipes.models import norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Saved):
    """The settings of the command."""

    name: str | None = setting(
        None, "Name of the run, made of the settings if not given.", compare=False
    )
    strategy: str = setting(
        "none",
        "How the training is spread over devices.",
        choices=["none", *devices.BACKENDS],
        compare=False,
    )
    job_addresses: str | None = setting(
        None, "host:port of each process, separated by commas.", compare=False
    )
    num_processes: int | None = setting(
        None, "Processes that train together.", at_least=1, compare=False
    )
    process_id: int | None = setting(
        None, "Number of this process, from 0.", at_least=0, compare=False
    )

    def __post_init__(self):
        super().__post_init__()
        for name in norms.unused(self.norm):
            if (value := getattr(self, name)) != getattr(Settings, name):
                raise ValueError(
                    f"Argument `{name}` has no effect with norm={self.norm!r}. "
                    f"Received: {name}={value!r}"
                )


def train(settings, strategy=None, **options):
    """Trains a network, continues its training, or returns its earlier results.

    Args:
        settings: A `classifier.Saved`.
        strategy: `None`, or what `recipes.engine.devices.get` returns.
        **options: `name`, `until` and `verbose` of `recipes.engine.training.train`.

    Returns:
        A `recipes.engine.training.Outcome`. Its results also have `saved_model`, the
        path of the network as it was after the epoch with the highest test accuracy.
    """
    if strategy is not None:
        options["name"] = options.get("name") or settings.directory().name
        runs, saved = settings.runs_dir, settings.saved_models_dir
        runs, saved = strategy.places(options["name"], runs, saved)
        settings = dataclasses.replace(settings, runs_dir=runs, saved_models_dir=saved)
    return training.train(
        settings,
        "",
        functools.partial(classifier.problem, strategy=strategy),
        keep_best=settings.saved_models_dir is not None,
        at_end=classifier.save,
        **options,
    )


def run(settings):
    """Trains, and prints the results."""
    strategy = devices.get(
        settings.strategy,
        settings.job_addresses,
        settings.num_processes,
        settings.process_id,
    )
    outcome = train(settings, strategy, name=settings.name, verbose="auto")
    print(f"{outcome.results['name']} is complete:")
    for key, value in outcome.results.items():
        print(f"  {key}: {value}")


if __name__ == "__main__":
    command.run(run, Settings)
