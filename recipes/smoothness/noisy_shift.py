r"""Distributional shift of activations: none, BN, and BN with noise after it.

The small runs, and the paper's for a GPU:

    python -m recipes.noisy_shift
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.noisy_shift --network=dln
    python -m recipes.noisy_shift --dataset=cifar10 --data_dir=<where it is> --width=1 \
        --steps=15000 --every=100
    python -m recipes.noisy_shift --norms=none,bn,lp1,lp2,lpinf

Claim (Section 2.1, Figures 1, 2 and 7; 8 and 14 are histograms of other networks): BN
with noise after it, fresh at each step, trains nearly as well as BN and better than no
norm, though its activations are less stable than those without a norm; the difference
in stability between BN and none is marginal. The paper's test accuracy on CIFAR-10 is
83 % with BN and 80 % without.

Activations are those that a nonlinearity is given, in training mode: at step t on its
batch, and at step t + 1 on its own, with the noise of that step.

The small run, VGG-16 of an eighth of the width on digits, 400 steps, took 4 minutes
on 2 cores of an Intel Xeon that much other work shared:

                 first step of 90 %    accuracy at the end    step to step, last layer:
                 training accuracy     training    test       change of mean / deviation
    none                  -             88.1 %    93.3 %             0.16
    bn                   20            100.0 %    98.3 %             0.000012
    noisy_bn             20             99.9 %    49.4 %             0.30

NoisyBN trains as fast as BN, as claimed. Inference is without the noise, but the moving
statistics are not: taken again without it (`keras_norms.recalibrate`), the test
accuracy is 98.3 %. BN's moments are much more stable than those without it.

Reference: Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help
Optimization?, NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import keras
import numpy as np
from absl import app, flags
from keras import ops

from keras_norms import diagnostics, recalibrate
from recipes import data, grid, landscape_figures, probed

NORMS = ("none", "bn", "noisy_bn")
# The fifth, tenth and last convolution, and every eighth linear layer with a norm.
LAYERS = {
    "vgg": ("stage3_conv1", "stage4_conv3", "stage5_conv3"),
    "dln": ("layer8", "layer16", "layer24"),
}
BINS = 60
CHANNEL = 0  # "a random activation from a given layer" (Figure 8): weights are random
TARGET_ACCURACY = 0.9
RECALIBRATION_STEPS = 10


def activations(model, layers, weights, state, x):
    """What linear layers give to the nonlinearity after them, in training mode.

    It is the output of the norm, or without one, of the linear layer itself. The model
    stays as it is.

    Args:
        model: A `keras.Model` of `recipes.probed`.
        layers: List of the names of linear layers.
        weights: List of arrays in place of the trainable weights.
        state: List of arrays in place of the non-trainable ones.
        x: Inputs of the model.

    Returns:
        List of arrays `(positions, channels)`, and the state after the call.
    """
    names = {layer.name for layer in model.layers}
    last = [f"{name}_norm" if f"{name}_norm" in names else name for name in layers]
    # The model's own output, so that all state moves on as it does in training.
    outputs = [*(model.get_layer(name).output for name in last), *model.outputs]
    probe = keras.Model(model.inputs, outputs)
    # A part of the model holds the same variables, maybe in another order.
    weights = _in_order(probe.trainable_variables, model.trainable_variables, weights)
    inner = _in_order(
        probe.non_trainable_variables, model.non_trainable_variables, state
    )
    found, moved = probe.stateless_call(
        weights, inner, ops.convert_to_tensor(x), training=True
    )
    moved = [ops.convert_to_numpy(value) for value in moved]
    moved = _in_order(
        model.non_trainable_variables, probe.non_trainable_variables, moved
    )
    values = [ops.convert_to_numpy(value) for value in found[: len(layers)]]
    return [value.reshape(-1, value.shape[-1]) for value in values], moved


def _in_order(wanted, variables, values):
    value_of = {id(v): value for v, value in zip(variables, values, strict=True)}
    return [value_of[id(variable)] for variable in wanted]


def measurement(layers):
    """The function `measure` of `recipes.probed.train` for these layers."""

    def measure(model, batch, step, config):
        x, y = batch(step)
        _, gradients = diagnostics.value_and_grad(model, x, y)
        weights = [ops.convert_to_numpy(v) for v in model.trainable_variables]
        state = [ops.convert_to_numpy(v) for v in model.non_trainable_variables]
        # The step of plain gradient descent on this batch is the one training takes.
        rate = config["learning_rate"]
        stepped = [w - rate * g for w, g in zip(weights, gradients, strict=True)]
        before, moved = activations(model, layers, weights, state, x)
        after, _ = activations(model, layers, stepped, moved, batch(step + 1)[0])
        values = {}
        for layer, a, b in zip(layers, before, after, strict=True):
            values |= {f"{layer}_{k}": v for k, v in changes(a, b).items()}
        return values

    return measure


def changes(before, after):
    """The moments of activations, how a step changes them, and a histogram.

    Args:
        before, after: Arrays `(positions, channels)` of two successive steps.

    Returns:
        Dict of the means over channels of: `mean` and `variance` before the step, the
        absolute changes `mean_change` and `variance_change`, and the same in units of
        the deviation and of the variance before the step, `relative_mean_change` and
        `relative_variance_change`. `histogram`: counts of channel `CHANNEL` in `BINS`
        equal bins between `edges`. What is not finite is `nan` or `None`.
    """
    with np.errstate(all="ignore"):
        before, after = before.astype("float64"), after.astype("float64")
        mean, variance = before.mean(0), before.var(0)
        change = np.abs(after.mean(0) - mean)
        variance_change = np.abs(after.var(0) - variance)
        moving = variance > 0  # a channel that is constant has no unit
        found = {
            "mean": mean.mean(),
            "variance": variance.mean(),
            "mean_change": change.mean(),
            "variance_change": variance_change.mean(),
            "relative_mean_change": _mean((change / np.sqrt(variance))[moving]),
            "relative_variance_change": _mean((variance_change / variance)[moving]),
        }
    one = before[:, CHANNEL]
    found = {key: float(value) for key, value in found.items()}
    if not np.isfinite(one).all():
        return found | {"histogram": None, "edges": None}
    counts, edges = np.histogram(one, BINS)
    return found | {
        "histogram": counts.tolist(),
        "edges": [float(edges[0]), float(edges[-1])],
    }


def _mean(values):
    return values.mean() if values.size else np.nan


def recalibrated(problem, config):
    """Tests a network with NoisyBN whose moving statistics are those without noise.

    Inference has no noise, but the moving statistics of a layer are those of what it
    was given in training, which is noisy wherever there is a NoisyBN before it.

    Args:
        problem: A `recipes.problems.Problem`; its model stays as it is.
        config: Its settings.

    Returns:
        Dict with `recalibrated_test_accuracy`, empty if the network has no such layer
        or there are no test images.
    """
    if config["norm"] != "noisy_bn" or problem.test is None:
        return {}
    model = keras.models.clone_model(problem.model)
    model.set_weights(problem.model.get_weights())
    batches = [problem.batch(step)[0] for step in range(RECALIBRATION_STEPS)]
    recalibrate(model, np.concatenate(batches), batch_size=128, verbose=0)
    x, y = problem.test
    logits = model.predict(x, batch_size=data.TEST_BATCH_SIZE, verbose=0)
    return {"recalibrated_test_accuracy": float((logits.argmax(-1) == y).mean())}


def noisy_shift(settings, norm_names=NORMS, layers=None, runs_dir="runs", **places):
    """Trains with every norm; writes the table and the figures.

    Args:
        settings: Dict of settings, see `recipes.probed.complete`.
        norm_names: List of names of `recipes.models.norms`.
        layers: List of the names of linear layers; `LAYERS` of the network if `None`.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.probed.train`.

    Returns:
        The path of the directory with table.md, results.json, training.png (Figures 1
        and 2), histograms.png (Figures 1, 2, 8 and 14) and moments.png (Figure 7).
    """
    network = probed.complete(settings)["network"]
    layers = tuple(layers or LAYERS[network])
    kind = "noisy_shift"
    if layers != LAYERS[network]:
        kind += f"-{'+'.join(layers)}"
    results, metrics = probed.train_all(
        kind,
        settings,
        norm_names,
        measurement(layers),
        at_end=recalibrated,
        runs_dir=runs_dir,
        **places,
    )
    rows = summary(results, metrics, layers)
    directory = probed.directory(kind, runs_dir, settings, norm_names)
    grid.write(directory, table(rows), {"rows": rows})
    draw(directory, metrics, layers, settings)
    return directory


def draw(directory, metrics, layers, settings):
    """Draws the three figures."""
    about = probed.about(settings)
    vgg = probed.complete(settings)["network"] == "vgg"
    panels = [
        ("train_accuracy", "training accuracy", {"ylim": (0, 1)}),
        ("test_accuracy", "test accuracy", {"ylim": (0, 1)}),
    ]
    if not vgg:
        panels = [("train_loss", "training loss (sum of squares)", {"yscale": "log"})]
    landscape_figures.training(directory / "training.png", metrics, panels, about)
    landscape_figures.histograms(directory / "histograms.png", metrics, layers, about)
    columns = [
        ("mean_change", "change of the mean", {"yscale": "log"}),
        ("variance_change", "change of the variance", {"yscale": "log"}),
        ("relative_mean_change", "of the mean / deviation", {"yscale": "log"}),
    ]
    path = directory / "moments.png"
    landscape_figures.by_layer(path, metrics, layers, columns, about)


KEYS = {
    "mean_change": "change of the mean",
    "variance_change": "change of the variance",
    "relative_mean_change": "the first / deviation",
    "relative_variance_change": "the second / variance",
}


def summary(results, metrics, layers):
    """How each norm trained, and a dict for each of its layers.

    Args:
        results, metrics: See `recipes.probed.train_all`.
        layers: List of names.

    Returns:
        List of dicts with `norm`, the results of its run, `step_of_target`, the first
        measured interval whose mean training accuracy is at least `TARGET_ACCURACY` (or
        `None`), and `layers`, a dict from a layer to the medians of `KEYS` over steps.
    """
    return [
        {
            "norm": norm,
            **results[norm],
            "step_of_target": next(
                (
                    line["step"]
                    for line in lines
                    if (line.get("train_accuracy") or 0) >= TARGET_ACCURACY
                ),
                None,
            ),
            "layers": {
                layer: {
                    key: landscape_figures.median(lines, f"{layer}_{key}")
                    for key in KEYS
                }
                for layer in layers
            },
        }
        for norm, lines in metrics.items()
    ]


def table(rows):
    """Returns the rows of `noisy_shift` as two Markdown tables."""

    def cell(value):
        return "–" if value is None else f"{value:.4g}"

    keys = ("train_loss", "train_accuracy", "test_accuracy")
    keys += ("recalibrated_test_accuracy", "step_of_target")
    keys = [key for key in keys if any(row.get(key) is not None for row in rows)]
    names = [key.replace("_", " ") for key in keys]
    first = [[row["norm"], *(cell(row.get(key)) for key in keys)] for row in rows]
    second = [
        [layer, row["norm"], *(cell(row["layers"][layer][key]) for key in KEYS)]
        for layer in rows[0]["layers"]
        for row in rows
    ]
    return (
        grid.markdown(["norm", *names], first)
        + f"\nLoss and accuracies of the last interval; the target is a training "
        f"accuracy of {TARGET_ACCURACY:.0%}.\n\n"
        + grid.markdown(["layer", "norm", *KEYS.values()], second)
        + "\nMeans over channels, medians over the measured steps.\n"
    )


def main(_):
    layers = flags.FLAGS.layers or None
    grid.report(noisy_shift(layers=layers, **probed.arguments_of_flags()))


if __name__ == "__main__":
    probed.define_flags(NORMS)
    flags.DEFINE_list("layers", [], "Names of layers; three of the network if empty.")
    app.run(main)
