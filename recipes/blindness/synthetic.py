"""Which orders of a polynomial loss pass batch normalization.

    python -m recipes.blindness.synthetic

Claim (Zhou et al., Table 1): put BN without affine weights on the scalar output of a
multilayer perceptron, with x BN's input, y its output, and

    Loss_k(y) = sum_i sum_{j=k..4} lambda_j y_i^j          lambda ~ N(0, I_5)
    delta_q = E |dLoss_q/dx - dLoss_{q+1}/dx| / |dLoss_q/dx|

Then orders 0, 1 and 2 do not reach x, and order 3 does. All draws of lambda share one
BN layer, with a channel each: the loss of an order takes one gradient. The network is 5
Dense layers of 100 with ReLU and one of 1; its inputs are Gaussian, 100 in a batch (the
paper does not say). Mean and deviation over 1,000 draws for each of 3 networks (10
seconds on an AMD EPYC; TensorFlow):

    order        0            1                    2                  3
    paper        0    1.8e-7 ± 2.1e-7    2.9e-7 ± 0.4e-7    0.51 ± 0.33
    float32      0    1.7e-7 ± 1.5e-7    1.9e-7 ± 1.2e-7    0.48 ± 0.34
    float64      0    2.7e-16 ± 1.6e-16  3.0e-16 ± 1.6e-16  0.47 ± 0.36

Reference: Zhou et al., 2022, https://arxiv.org/abs/2205.15146
"""

import dataclasses

import keras
import numpy as np
from keras import layers, ops

from keras_norms import diagnostics
from recipes.engine import command, results, settings
from recipes.engine.precision import available, precision
from recipes.engine.settings import setting

ORDERS = 5
PAPER = ("0 ± 0", "1.79e-07 ± 2.07e-07", "2.85e-07 ± 3.94e-08", "5.1e-01 ± 3.3e-01")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.Settings):
    """How many draws, samples and networks."""

    draws: int = setting(1000, "Draws of the coefficients.", at_least=1)
    samples: int = setting(100, "Samples in the batch.", at_least=3)
    seeds: int = setting(3, "Networks, each with inputs of its own.", at_least=1)


def network(draws, width=100, depth=5, epsilon=1e-20):
    """The perceptron, its scalar output once for each draw, and BN of all of them."""
    x = inputs = layers.Input((width,))
    for _ in range(depth):
        x = layers.Dense(width, activation="relu", kernel_initializer="he_normal")(x)
    x = layers.Dense(1)(x)
    x = ops.repeat(x, draws, axis=-1)
    outputs = layers.BatchNormalization(
        center=False, scale=False, epsilon=epsilon, name="norm"
    )(x)
    return keras.Model(inputs, outputs)


def polynomial_loss(coefficients, y):
    """`sum_j lambda_j y^j`, one number per sample, from `(samples, draws, 5)` and y."""
    result = coefficients[..., -1]
    for order in reversed(range(ORDERS - 1)):
        result = result * y + coefficients[..., order]
    return ops.sum(result, -1)


def deltas(draws=1000, samples=100, seed=0, epsilon=1e-20):
    """delta_q of every draw, `(4, draws)`, in the current precision of Keras."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    model = network(draws, epsilon=epsilon)
    x = rng.normal(size=(samples, model.input_shape[-1]))
    coefficients = np.tile(rng.normal(size=(draws, ORDERS)), (samples, 1, 1))
    slopes = []
    for k in range(ORDERS):
        coefficients[..., :k] = 0
        found = diagnostics.value_and_grad(
            model, x, coefficients, polynomial_loss, layer="norm", side="input"
        )
        slopes.append(found.gradient.astype("float64"))
    change, size = np.diff(slopes, axis=0), np.array(slopes[:-1])
    return np.linalg.norm(change, axis=1) / np.linalg.norm(size, axis=1)


def run(settings):
    """Measures Table 1; returns the directory with table.md and results.json."""
    found, sizes = {}, (settings.draws, settings.samples)
    for dtype in available():
        with precision(dtype):
            every = [deltas(*sizes, seed) for seed in range(settings.seeds)]
        found[dtype] = [
            results.mean_and_std(of_order)
            | {"median": float(np.median(of_order)), "largest": float(of_order.max())}
            for of_order in np.concatenate(every, axis=1)
        ]
    directory = settings.directory("blindness_synthetic")
    results.write(directory, table(found), found)
    return directory


def table(found):
    """Returns the results as Markdown, with the paper's row."""
    rows = [["paper", *PAPER]]
    for dtype, orders in found.items():
        means = [results.spread(order, 2, kind="e") for order in orders]
        rows.append([f"{dtype}, mean", *means])
        for key in ("median", "largest"):
            rows.append([f"{dtype}, {key}", *(f"{order[key]:.2e}" for order in orders)])
    return results.markdown(["order", "0", "1", "2", "3"], rows)


if __name__ == "__main__":
    command.run(run, Settings)
