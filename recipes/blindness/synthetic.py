"""Which orders of a polynomial loss pass batch normalization.

    python -m recipes.blindness_synthetic

Claim (Zhou et al., Table 1): with BN without affine weights on the scalar output of a
multilayer perceptron, x its input, y its output, and

    Loss_k(y) = sum_i sum_{j=k..4} lambda_j y_i^j          lambda ~ N(0, I_5)
    delta_q = E |dLoss_q/dx - dLoss_{q+1}/dx| / |dLoss_q/dx|

the orders 0, 1 and 2 do not reach x, and the order 3 does. All draws of lambda are one
BN layer with a channel each, so that a loss of an order is one gradient. The network
is 5 Dense layers of 100 with ReLU and a Dense layer of 1; its inputs are Gaussian. The
paper gives no size of the batch, it is 100 here.

Mean and deviation over 1,000 draws for each of 3 networks (half a minute on 2 cores of
an Intel Xeon that other work shared; TensorFlow):

    order        0            1                    2                  3
    paper        0    1.8e-7 ± 2.1e-7    2.9e-7 ± 0.4e-7    0.51 ± 0.33
    float32      0    1.7e-7 ± 1.5e-7    1.9e-7 ± 1.2e-7    0.48 ± 0.34
    float64      0    2.7e-16 ± 1.6e-16  3.0e-16 ± 1.6e-16  0.47 ± 0.36

Reference: Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First
and Second Derivatives of the Loss, 2022, Table 1. https://arxiv.org/abs/2205.15146
"""

import pathlib

import keras
import numpy as np
from absl import app, flags
from keras import layers, ops

from keras_norms import diagnostics
from recipes import grid
from recipes.precision import available, precision

ORDERS = 5
PAPER = ("0 ± 0", "1.79e-07 ± 2.07e-07", "2.85e-07 ± 3.94e-08", "5.1e-01 ± 3.3e-01")


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
    """`sum_j lambda_j y^j`, a number a sample.

    Args:
        coefficients: Tensor `(samples, draws, 5)`.
        y: Tensor `(samples, draws)`.
    """
    result = coefficients[..., -1]
    for order in reversed(range(ORDERS - 1)):
        result = result * y + coefficients[..., order]
    return ops.sum(result, -1)


def deltas(draws=1000, samples=100, seed=0, epsilon=1e-20):
    """delta_q of every draw, in the precision that Keras is set to.

    Args:
        draws, samples: Integers.
        seed: Integer, of the network, the inputs and the coefficients.
        epsilon: Float, of BN.

    Returns:
        Array of shape `(4, draws)`, q from 0 to 3.
    """
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
    return np.array(
        [
            np.linalg.norm(this - without, axis=0) / np.linalg.norm(this, axis=0)
            for this, without in zip(slopes, slopes[1:])
        ]
    )


def blindness_synthetic(draws=1000, samples=100, seeds=3, runs_dir="runs"):
    """Measures Table 1 with several networks; writes table.md and results.json.

    Args:
        draws, samples: See `deltas`.
        seeds: Integer, networks with inputs and coefficients of their own.
        runs_dir: Where the outcome is recorded.

    Returns:
        The path of the directory.
    """
    results = {}
    for dtype in available():
        with precision(dtype):
            every = np.concatenate(
                [deltas(draws, samples, seed) for seed in range(seeds)], 1
            )
        results[dtype] = {
            "mean": every.mean(1).tolist(),
            "std": every.std(1).tolist(),
            "median": np.median(every, 1).tolist(),
            "largest": every.max(1).tolist(),
        }
    name = f"blindness_synthetic-draws{draws}-samples{samples}-seeds{seeds}"
    backend = keras.backend.backend()
    directory = pathlib.Path(runs_dir) / f"{name}-{backend}"
    grid.write(directory, table(results), results)
    return directory


def table(results):
    """Returns the results as Markdown, with the paper's row."""
    rows = [["paper", *PAPER]]
    for dtype, found in results.items():
        pairs = zip(found["mean"], found["std"])
        rows.append([f"{dtype}, mean", *(f"{m:.2e} ± {s:.2e}" for m, s in pairs)])
        rows.append([f"{dtype}, median", *(f"{m:.2e}" for m in found["median"])])
        rows.append([f"{dtype}, largest", *(f"{m:.2e}" for m in found["largest"])])
    return grid.markdown(["order", "0", "1", "2", "3"], rows)


def main(_):
    values = flags.FLAGS
    grid.report(
        blindness_synthetic(values.draws, values.samples, values.seeds, values.runs_dir)
    )


if __name__ == "__main__":
    flags.DEFINE_integer("draws", 1000, "Of the coefficients.", lower_bound=1)
    flags.DEFINE_integer("samples", 100, "In the batch.", lower_bound=3)
    flags.DEFINE_integer("seeds", 3, "How many networks.", lower_bound=1)
    flags.DEFINE_string("runs_dir", "runs", "Where the outcome is recorded.")
    app.run(main)
