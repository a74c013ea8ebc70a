"""The assumptions of CBN's theorems, 0 < eta_k < 2 and 0 < tau_k < 1, in training.

The small run and the paper's, for a GPU:

    python -m recipes.cbn.assumptions
    python -m recipes.cbn.assumptions --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet20

Claim (Section 4.1, Figures 2 and 3): both "can be commonly satisfied". For each channel
of the first CBN of each stage,

    eta_k = (mu_B - beta) / mu_A           of Theorem 2 (mean removal)
    tau_k = gamma / (rho * sigma_B)        of Theorem 3 (l2 norm)

with mu_B the mean of one mini-batch, sigma_B = sqrt(mean((x - mu_B + beta)^2)) and mu_A
the moving mean of Eq. 8 after that batch, which the paper takes for E[x]. They are
measured after each epoch. This eta_k is not the eta of AMAT.

The small run (ResNet-20 on digits, 5 trainings) took 4 minutes and 30 seconds on 2
cores of an Intel Xeon that other work shared. Share of channels within, %, all epochs:

                     eta_k, stages 1 to 3    tau_k, stages 1 to 3
    sigmoid               100   100   100           0     0     0
    tanh                   25    43    50          43    34    13
    relu                   94   100   100          53   100   100
    selu                   88   100   100          87   100   100
    swish                  94   100   100          42   100   100

The claim holds for ReLU, SELU and Swish but in the first layer, and not for tanh; the
tau_k of sigmoid is 2 to 5, as its outputs deviate by less than 0.5.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Theorems 2 and 3. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import functools

import keras
import numpy as np
from keras import ops

from recipes.engine import classifier, command, data, figures, results, training
from recipes.engine.settings import setting

# Layers #2, #8 and #14 of the paper's ResNet-20.
LAYERS = {f"stage {i}": f"stage{i}_block0_conv1_norm" for i in (1, 2, 3)}
INTERVALS = {"eta": (0, 2), "tau": (0, 1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """CBN with every activation."""

    model: str = setting("resnet20", "A residual network for small images.")
    norm: str = setting(
        "cbn", "CBN of which averages.", choices=("cbn", "cbn_batch", "cbn_fixed")
    )
    activations: tuple[str, ...] = setting(classifier.ACTIVATIONS, "As Keras has them.")
    seeds: int = 1


def assumption_values(x, gamma, beta, rho, moving_mean):
    """eta_k and tau_k of every channel, float64; not finite where they divide by 0.

    Args:
        x: The layer's inputs, `(batch, ..., channels)`.
        gamma, beta, moving_mean: Of the layer, `(channels,)`.
        rho: Number.

    Returns:
        Two arrays of shape `(channels,)`.
    """
    x = np.asarray(x, "float64")
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    sigma = np.sqrt(np.square(x - mean + beta).mean(axes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (mean - beta) / moving_mean, gamma / (rho * sigma)


def measure(model, problem, settings):
    """eta_k and tau_k of every channel of `LAYERS`: a list a layer of each."""
    layers = [model.get_layer(name) for name in LAYERS.values()]
    # The output is asked for so that the layer moves its mean on.
    outputs = [[layer.input, layer.output] for layer in layers]
    probe = keras.Model(model.inputs, outputs)
    ((x, _),) = data.other_batches(settings, 1)
    outputs, state = probe.stateless_call(
        [v.value for v in probe.trainable_variables],
        [v.value for v in probe.non_trainable_variables],
        ops.convert_to_tensor(x),
        training=True,
    )
    place = {v.path: i for i, v in enumerate(probe.non_trainable_variables)}
    values = {}
    for stage, layer, (inputs, _) in zip(LAYERS, layers, outputs, strict=True):
        moving_mean = state[place[layer.moving_mean.path]]
        arrays = inputs, layer.gamma, layer.beta, layer.rho, moving_mean
        eta, tau = assumption_values(*map(ops.convert_to_numpy, arrays))
        values[f"eta {stage}"] = eta.tolist()
        values[f"tau {stage}"] = tau.tolist()
    return values


train = functools.partial(classifier.train, kind="cbn_assumptions", after=measure)


def run(settings):
    """Trains with CBN and every activation; writes the table and the figures.

    Returns:
        The path of the directory with table.md, results.json, eta.png (Figure 2) and
        tau.png (Figure 3).
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    found = {
        (name, activation, stage): pooled(
            [each.metrics for each in outcomes.of(activation=activation)],
            f"{name} {stage}",
        )
        for name in INTERVALS
        for activation in settings.activations
        for stage in LAYERS
    }
    rows = [
        {
            "activation": activation,
            "value": name,
            "layer": stage,
            **shares(values, INTERVALS[name]),
        }
        for (name, activation, stage), values in found.items()
    ]
    directory = settings.directory("cbn_assumptions")
    runs = [outcome.results for outcome in outcomes.values()]
    results.write(directory, table(rows), {"rows": rows, "runs": runs})
    for name, ylim in (("eta", (-1, 3)), ("tau", (-0.5, 5))):
        panels = {
            activation: {
                stage: _finite(found[name, activation, stage]) for stage in LAYERS
            }
            for activation in settings.activations
        }
        figures.distributions(
            directory / f"{name}.png",
            panels,
            INTERVALS[name],
            f"{name}_k",
            f"{name}_k over channels: {settings.about()}, rho = {settings.rho:g}",
            ylim,
        )
    return directory


def pooled(curves, key):
    """The values of all seeds: a list an epoch, `nan` where they were not finite."""
    epochs = max(len(curve) for curve in curves)
    values = [[] for _ in range(epochs)]
    for curve in curves:
        for epoch, line in zip(values, curve):  # a diverged run is shorter
            epoch += [np.nan if v is None else v for v in line.get(key, [])]
    return [epoch for epoch in values if epoch]


def _finite(values):
    kept = [[v for v in epoch if np.isfinite(v)] for epoch in values]
    return [epoch for epoch in kept if epoch]


def shares(values, interval):
    """The share of channels within an open interval.

    Args:
        values: List with the values of all channels at each epoch. What is not finite
            is outside.
        interval: Two numbers.

    Returns:
        Dict of the share after the first epoch, after the last, over all of them, and
        the share of channels that are not finite. `None` where there are no values.
    """
    low, high = interval
    if not values:
        return dict.fromkeys(("first", "last", "all", "not_finite"))
    within = [np.greater(v, low) & np.less(v, high) for v in values]
    return {
        "first": float(np.mean(within[0])),
        "last": float(np.mean(within[-1])),
        "all": float(np.mean(np.concatenate(within))),
        "not_finite": float(np.mean(~np.isfinite(np.concatenate(values)))),
    }


def table(rows):
    """The rows as Markdown."""
    columns = {
        "first": "epoch 1",
        "last": "last epoch",
        "all": "all",
        "not_finite": "not finite",
    }
    text = ""
    for name, (low, high) in INTERVALS.items():
        lines = [
            [
                row["activation"],
                row["layer"],
                *("–" if row[c] is None else f"{100 * row[c]:.1f}" for c in columns),
            ]
            for row in rows
            if row["value"] == name
        ]
        header = ["activation", "layer", *columns.values()]
        text += (
            f"Share of channels with {low} < {name}_k < {high}, %\n\n"
            f"{results.markdown(header, lines)}\n"
        )
    return text + (
        '"Not finite" are channels that divide by 0 (a ReLU that is never active); '
        "they count as outside.\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
