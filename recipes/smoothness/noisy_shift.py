r"""Distributional shift of activations: none, BN, and BN with noise after it.

The small runs, and the paper's for a GPU:

    python -m recipes.smoothness.noisy_shift
    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python -m recipes.smoothness.noisy_shift \
        --network=dln
    python -m recipes.smoothness.noisy_shift --dataset=cifar10 \
        --data_dir=<where it is> --width=1 --steps=15000 --every=100 \
        --initializer=glorot_uniform
    python -m recipes.smoothness.noisy_shift --norms=none,bn,lp1,lp2,lpinf
    python -m recipes.smoothness.noisy_shift --norms=none,bn,noisy_bn,noise

Claim (Section 2.1, Figures 1, 2 and 7; 8 and 14 are histograms of other networks): BN
with noise after it, fresh at each step, trains nearly as well as BN and better than no
norm, though its activations are less stable than those without a norm. The difference
in stability between BN and no norm is marginal. The paper's test accuracy on CIFAR-10
is 83 % with BN and 80 % without.

Activations are the inputs of a nonlinearity and, if they come from a norm, also the
inputs of that norm. They are taken in training mode, at step t on its batch and at step
t + 1 on its own, with that step's noise. After BN a channel has mean beta and variance
gamma^2, whatever its input: BN's effect on a network's stability shows before it.

The small run, VGG-16 at an eighth of the width on digits, 400 steps, takes 3.5 minutes
on two shared cores of an AMD EPYC. NoisyBN, like BN, reaches 90 % training accuracy by
step 20, no norm by step 180. Inference has no noise, but the moving statistics include
it, and 50.6 % of test images are right. With statistics measured again without it
(`keras_norms.recalibrate`) 98.1 % are; BN has 98.3 %, no norm 97.2 %. In the last
layer, means move by 0.30 deviations per step with NoisyBN, 0.09 without a norm, 0.00001
with BN, and 0.018 before BN. The noise alone prevents training entirely.

On CIFAR-10 (VGG-16 at a quarter of the width, 5,000 steps) NoisyBN ends at 83 %
training accuracy, BN at 93, no norm at 76 and the noise alone at 62. Means before BN
move by 0.01 to 0.03 deviations per step, without a norm by 0.11 to 0.14. l_p norms end
at 89 to 92 %, and their means move less than without a norm. See
docs/results/noisy_shift.md.

Reference: Santurkar et al., NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import dataclasses

import keras
import numpy as np
from keras import ops

from keras_norms import diagnostics, recalibrate
from recipes.engine import command, data, results, training
from recipes.models import norms
from recipes.smoothness import _reports as reports
from recipes.smoothness import _training as descent

ACCURACIES = ("train_accuracy", "test_accuracy")
TARGET = 0.9
RECALIBRATION_STEPS = 10
BEFORE = ", before the norm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(descent.Layered):
    """The settings of one training."""

    # Every eighth linear layer with a norm.
    LAYERS = descent.Layered.LAYERS | {"dln": ("layer8", "layer16", "layer24")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Run, descent.Descents):
    """Every norm, with the activations of some layers measured."""

    RUN = Run

    norms: tuple[str, ...] = ("none", "bn", "noisy_bn")


def train(settings):
    """Trains and measures a network; see `recipes.smoothness._training.train`."""
    return descent.train(settings, "noisy_shift", measure, at_end=recalibrated)


def measure(model, batches, settings):
    """The moments of layers and how a step changes them, for a line of metrics."""
    x, y = batches[0]
    _, gradients = diagnostics.value_and_grad(model, x, y)
    weights = [training.numpy_copy(v) for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    after_layers = norms.get(settings.norm).placement == "after"
    outputs = places(model, settings.layers, after_layers)
    before, state = activations(model, outputs, weights, state, x)
    # Training takes this very step of plain gradient descent on this batch.
    for weight, gradient in zip(weights, gradients, strict=True):
        weight -= settings.learning_rate * gradient
    after, _ = activations(model, outputs, weights, state, batches[1][0])
    return {
        f"{place}_{key}": value
        for place, a, b in zip(outputs, before, after, strict=True)
        for key, value in changes(a, b).items()
    }


def places(model, layers, normalised=True):
    """Outputs of a model by place: `layer` is the input of its nonlinearity.

    If layers are `normalised`, that is the output of the norm after the layer, and
    `layer` plus `BEFORE` the layer's own output. If not, it is the layer's own output.
    """
    found, names = {}, {layer.name for layer in model.layers}
    for layer in layers:
        found[layer] = output = descent.layer(model, layer).output
        if normalised and f"{layer}_norm" in names:
            found[layer] = model.get_layer(f"{layer}_norm").output
            found[layer + BEFORE] = output
    return found


def activations(model, outputs, weights, state, x):
    """The values of `outputs`, a dict of `places`, in training mode.

    The model does not change: `weights` replace its trainable variables, and `state`
    the others. Returns a list of arrays `(positions, channels)`, and the state after
    the call.
    """
    # With the model's own output, all state is updated as in training.
    probe = keras.Model(model.inputs, [*outputs.values(), *model.outputs])
    x = ops.convert_to_tensor(x)
    found, state = probe.stateless_call(weights, state, x, training=True)
    found = [ops.convert_to_numpy(value) for value in found[: len(outputs)]]
    return [value.reshape(-1, value.shape[-1]) for value in found], state


def changes(before, after):
    """The moments of activations, how a step changes them, and a histogram.

    `before` and `after` are arrays `(positions, channels)` of two successive steps.
    Values are means over channels; `relative_...` is in units of the deviation and the
    variance before the step. `histogram` is the counts of one channel in equal bins
    between `edges`. What is not finite is `nan` or `None`.
    """
    with np.errstate(all="ignore"):
        before, after = before.astype("float64"), after.astype("float64")
        mean, variance = before.mean(0), before.var(0)
        change = np.abs(after.mean(0) - mean)
        variance_change = np.abs(after.var(0) - variance)
        moving = variance > 0  # a channel that is constant has no unit
        values = {
            "mean": mean,
            "variance": variance,
            "mean_change": change,
            "variance_change": variance_change,
            "relative_mean_change": change[moving] / np.sqrt(variance[moving]),
            "relative_variance_change": variance_change[moving] / variance[moving],
        }
        found = {key: value.sum() / value.size for key, value in values.items()}
    # "A random activation from a given layer" (Figure 8): weights are random.
    one = before[:, 0]
    if not np.isfinite(one).all():
        return found | {"histogram": None, "edges": None}
    counts, edges = np.histogram(one, bins=60)
    return found | {"histogram": counts.tolist(), "edges": edges[[0, -1]].tolist()}


def recalibrated(model, problem, settings, run):
    """Tests a network with NoisyBN after its statistics were measured without noise.

    Inference has no noise, but in training a layer's input is noisy if there is a
    NoisyBN before it. Returns an empty dict without such a layer or test images.
    """
    if settings.norm != "noisy_bn" or problem.test is None:
        return {}
    model = training.standalone(model, problem)
    batches = problem.batches(0)
    seen = np.concatenate([batches[i][0] for i in range(RECALIBRATION_STEPS)])
    recalibrate(model, seen, batch_size=128, verbose=0)
    x, y = problem.test
    logits = model.predict(x, batch_size=data.TEST_BATCH_SIZE, verbose=0)
    return {"recalibrated_test_accuracy": float((logits.argmax(-1) == y).mean())}


def run(settings):
    """Trains with every norm and returns the directory with the results.

    training.png is Figures 1 and 2, histograms.png Figures 1, 2, 8 and 14, and
    moments.png Figure 7.
    """
    outcomes = training.train_all(train, settings.runs(), settings.workers)
    rows = []
    for norm in settings.norms:
        found = outcomes.of(norm=norm)
        measured = found[0].metrics[0]
        layers = {
            place: reports.medians(found, place, MEDIANS)
            for layer in settings.layers
            for place in (layer, layer + BEFORE)
            if f"{place}_mean" in measured
        }
        steps = [first_step(outcome.metrics) for outcome in found]
        row = {"norm": norm, "step_of_target": steps, "layers": layers}
        rows.append(reports.summary(found) | row)
    directory = settings.directory("noisy_shift")
    results.write(directory, table(rows, settings.seeds), {"rows": rows})
    runs, title = reports.runs_of(outcomes, settings), settings.about()
    scores = ACCURACIES if settings.network == "vgg" else ["train_loss"]
    reports.training_curves(directory / "training.png", runs, settings, *scores)
    reports.histograms(directory / "histograms.png", runs, settings.layers, title)
    columns = [
        ("change of the mean", "mean_change"),
        ("change of the variance", "variance_change"),
        ("of the mean / deviation", "relative_mean_change"),
    ]
    path = directory / "moments.png"
    reports.by_layer(path, runs, settings.layers, columns, title)
    return directory


def first_step(lines):
    """The first measured step of an interval that reached the target, or `None`."""
    reached = (each for each in lines if (each.get("train_accuracy") or 0) >= TARGET)
    return next((each["step"] for each in reached), None)


MEDIANS = {
    "variance": "variance",
    "mean_change": "change of the mean",
    "variance_change": "change of the variance",
    "relative_mean_change": "of the mean / deviation",
    "relative_variance_change": "of the variance / variance",
}


def table(rows, seeds):
    """The rows as two Markdown tables."""
    columns = ["norm", "train_loss", *ACCURACIES, "recalibrated_test_accuracy"]
    note = "Loss and accuracies of the last interval"
    if "train_accuracy" in rows[0]:
        columns.append("step_of_target")
        note += f"; the target is a training accuracy of {TARGET:.0%}"
    titles = {key: key.replace("_", " ") for key in columns}
    first = reports.table(rows, titles, f"{note}.\n")
    of_layers = [
        {"layer": place, "norm": row["norm"]} | row["layers"][place]
        for place in dict.fromkeys(place for row in rows for place in row["layers"])
        for row in rows
        if place in row["layers"]
    ]
    titles = {"layer": "layer", "norm": "norm"} | MEDIANS
    note = "Means over channels, medians over the measured steps. "
    return first + reports.table(of_layers, titles, note + results.note(seeds))


if __name__ == "__main__":
    command.run(run, Settings)
