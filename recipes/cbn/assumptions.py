r"""The assumptions of CBN's theorems, 0 < eta_k < 2 and 0 < tau_k < 1, in training.

The small run and the paper's, for a GPU:

    python -m recipes.cbn.assumptions
    python -m recipes.cbn.assumptions --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet20

Claim (Section 4.1, Figures 2 and 3): both "can be commonly satisfied". For each channel
of the first CBN of each stage,

    eta_k = (mu_B - beta) / mu_A           of Theorem 2 (mean removal)
    tau_k = gamma / (rho * sigma_B)        of Theorem 3 (l2 norm)

with mu_B the mean of one mini-batch, sigma_B = sqrt(mean((x - mu_B + beta)^2)) and mu_A
the moving mean of Eq. 8 after that batch, which the paper uses as E[x]. They are
measured after each epoch. This eta_k is not the eta of AMAT.

Share of channels within the bounds, %, all epochs, ResNet-20 on digits (5 trainings,
2.5 minutes on two cores of an AMD EPYC). The claim holds for ReLU, SELU and Swish
except in the first layer, and not for tanh; the tau_k of sigmoid is 2 to 5:

                     eta_k, stages 1 to 3    tau_k, stages 1 to 3
    sigmoid               100   100   100           0     0     0
    tanh                   21    47    43          45    37    12
    relu                   94   100   100          53   100   100

On 10,000 images of CIFAR-10 with 10 epochs (docs/results/cbn_assumptions.md) it is the
same after stage 1: ReLU has 94, 100, 100 and 69, 100, 100, sigmoid 74, 100, 100 and 10,
0, 0.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pandas as pd
from keras import ops

from recipes.engine import classifier, command, data, figures, results, training
from recipes.engine.settings import setting

# Layers #2, #8 and #14 of the paper's ResNet-20.
LAYERS = {f"stage {i}": f"stage{i}_block0_conv1_norm" for i in (1, 2, 3)}
INTERVALS = {"eta": (0, 2), "tau": (0, 1)}
# The shares of a row, and their columns.
COLUMNS = dict(first="epoch 1", last="last epoch", all="all", not_finite="not finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(classifier.Grid):
    """CBN with every activation."""

    model: str = setting(
        "resnet20", "A residual network of basic blocks.", matches="resnet(?!(50|101)$)"
    )
    norm: str = setting(
        "cbn",
        "CBN with averages of this kind.",
        choices=("cbn", "cbn_batch", "cbn_fixed"),
    )
    activations: tuple[str, ...] = classifier.ACTIVATIONS
    seeds: int = 1


def assumption_values(x, gamma, beta, rho, moving_mean):
    """eta_k and tau_k of every channel, float64; not finite where they divide by 0.

    `x` is the input, `(batch, ..., channels)`; the others are the layer's variables.
    """
    x = np.asarray(x, "float64")
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    sigma = np.sqrt(np.square(x - mean + beta).mean(axes))
    with np.errstate(divide="ignore", invalid="ignore"):
        return (mean - beta) / moving_mean, gamma / (rho * sigma)


def measure(model, problem, settings):
    """eta_k and tau_k of every channel of `LAYERS`: for each, one list per layer."""
    layers = [model.get_layer(name) for name in LAYERS.values()]
    # Computing the output makes the layer update its mean.
    outputs = [[layer.input, layer.output] for layer in layers]
    probe = keras.Model(model.inputs, outputs)
    ((x, _),) = data.other_batches(settings, 1)
    weights, values = model.get_weights(), {}
    outputs = probe([x], training=True)
    for stage, layer, (inputs, _) in zip(LAYERS, layers, outputs, strict=True):
        arrays = inputs, layer.gamma, layer.beta, layer.rho, layer.moving_mean
        eta, tau = assumption_values(*map(ops.convert_to_numpy, arrays))
        values |= {f"eta {stage}": eta.tolist(), f"tau {stage}": tau.tolist()}
    model.set_weights(weights)
    return values


train = functools.partial(classifier.train, kind="cbn_assumptions", after=measure)


def run(settings):
    """Trains everything; returns the directory with the table and the figures."""
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows, panels = [], {name: {} for name in INTERVALS}
    swept = INTERVALS, settings.activations, LAYERS
    for name, activation, stage in itertools.product(*swept):
        curves = [each.metrics for each in outcomes.of(activation=activation)]
        values = pooled(curves, f"{name} {stage}")
        row = {"activation": activation, "value": name, "layer": stage}
        rows.append(row | shares(values, INTERVALS[name]))
        finite = [v[np.isfinite(v)] for v in values if np.isfinite(v).any()]
        panels[name].setdefault(activation, {})[stage] = finite
    directory = settings.directory("cbn_assumptions")
    runs = [outcome.results for outcome in outcomes.values()]
    results.write(directory, table(rows), {"rows": rows, "runs": runs})
    about = f"over channels: {settings.about()}, rho = {settings.rho:g}"
    for name, ylim in (("eta", (-1, 3)), ("tau", (-0.5, 5))):  # Figures 2 and 3
        path, drawn = directory / f"{name}.png", (panels[name], INTERVALS[name])
        figures.distributions(path, *drawn, f"{name}_k", f"{name}_k {about}", ylim)
    return directory


def pooled(curves, key):
    """The values of all seeds: one array per epoch, `nan` where not finite."""
    epochs = itertools.zip_longest(*curves, fillvalue={})  # a diverged run is shorter
    values = [[v for line in lines for v in line.get(key, [])] for lines in epochs]
    return [np.array(epoch, float) for epoch in values if epoch]


def shares(values, interval):
    """Shares of channels in an open interval; their values are one list per epoch."""
    if not values:
        return dict.fromkeys(COLUMNS)
    low, high = interval
    within = [np.greater(v, low) & np.less(v, high) for v in values]
    infinite = ~np.isfinite(np.concatenate(values))
    found = within[0], within[-1], np.concatenate(within), infinite
    return {key: float(np.mean(of)) for key, of in zip(COLUMNS, found, strict=True)}


def table(rows):
    """The rows as Markdown."""
    frame, text = pd.DataFrame(rows), ""
    for name, (low, high) in INTERVALS.items():
        part = frame[frame["value"] == name]
        percents = (100 * part[list(COLUMNS)].astype(float)).map("{:.1f}".format)
        part = part[["activation", "layer"]].join(percents.replace("nan", "–"))
        text += f"Share of channels with {low} < {name}_k < {high}, %\n\n"
        text += f"{results.markdown(part.rename(columns=COLUMNS), part.values)}\n"
    return text + (
        '"Not finite" are channels that divide by 0 (a ReLU that is never active); '
        "they count as outside.\n"
    )


if __name__ == "__main__":
    command.run(run, Settings)
