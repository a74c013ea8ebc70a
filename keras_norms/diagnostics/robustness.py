"""Accuracy under noise and under attack."""

from typing import NamedTuple

import keras
import numpy as np

from keras_norms._checks import arguments
from keras_norms.diagnostics._engine.types import Data, Loss
from keras_norms.diagnostics.attack import Attack


class Robustness(NamedTuple):
    """What `robustness` returns.

    Attributes:
        clean: The accuracy, from 0 to 1.
        noise: The accuracy under Gaussian noise.
        attacked: The accuracy under the attack.
        noise_difference: `clean - noise`, "Acc-Diff1" of the paper.
        attack_difference: `clean - attacked`, "Acc-Diff2".
        without_gradient: The share of samples whose loss has a gradient of exactly zero
            at `x`, where it is saturated: the attack does not move them.
        samples: How many there are.
    """

    clean: float
    noise: float
    attacked: float
    noise_difference: float
    attack_difference: float
    without_gradient: float
    samples: int


def robustness(
    model: keras.Model,
    x: np.ndarray,
    y: np.ndarray,
    loss: Loss = None,
    *,
    noise: float = 0.1,
    epsilon: float = 8 / 255,
    norm: str | int = "inf",
    steps: int = 10,
    step_size: float | None = None,
    bounds: tuple[Data, Data] | None = (0.0, 1.0),
    batch_size: int = 128,
    seed: int = 0,
    verbose: str | int = "auto",
) -> Robustness:
    """Measure a classifier's accuracy: clean, under Gaussian noise and under attack.

    The noisy input is `x + n`, with `n` of mean 0 and standard deviation `noise`,
    clipped to `bounds`. The attack is `bim`. Layers run in inference mode. Nothing of
    the model changes.

    Example:

    >>> robustness(model, x_test, y_test, noise=0.1, epsilon=8 / 255)

    Args:
        model, x, y, loss, epsilon, norm, steps, step_size, bounds, batch_size, verbose:
            See `bim`.
        noise: Non-negative, in units of `x`.
        seed: Of the noise.

    Returns:
        A `Robustness`.

    Reference:

    - Sun et al., New Interpretations of Normalization Methods in Deep Learning, AAAI
      2020, Section 3.2, Tables 1 and 2. https://doi.org/10.1609/aaai.v34i04.6046
    """
    noise = arguments.number("noise", noise, at_least=0)
    rng = np.random.default_rng(arguments.integer("seed", seed, at_least=0))
    attack = Attack(model, x, y, loss, epsilon, norm, steps, step_size, bounds)
    hits, still = np.zeros(3), 0
    for batch in attack.batches(batch_size, verbose):
        disturbance = np.zeros(batch.x.shape)
        # So that the noise of a sample does not depend on the size of batches.
        disturbance[: batch.size] = rng.standard_normal(batch.x[: batch.size].shape)
        noisy = attack.clip(batch.x + noise * disturbance)
        attacked, without_gradient = attack.run(batch)
        hits += [attack.hits(batch, z) for z in (batch.x, noisy, attacked)]
        still += int(np.sum(without_gradient[: batch.size]))
    clean, noisy, attacked = (hits / attack.samples).tolist()
    differences = clean - noisy, clean - attacked
    return Robustness(
        clean, noisy, attacked, *differences, still / attack.samples, attack.samples
    )
