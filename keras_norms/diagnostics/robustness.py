"""Accuracy under noise and under attack."""

from typing import NamedTuple

import numpy as np

from keras_norms._checks import arguments
from keras_norms.diagnostics.attack import Attack


class Robustness(NamedTuple):
    """What `robustness` returns.

    Attributes:
        clean: Float, the accuracy, from 0 to 1.
        noise: Float, the accuracy under Gaussian noise.
        attacked: Float, the accuracy under the attack.
        noise_difference: Float, `clean - noise`, "Acc-Diff1" of the paper.
        attack_difference: Float, `clean - attacked`, "Acc-Diff2".
        without_gradient: Float, the share of samples whose loss has a gradient of
            exactly zero at `x`, where it is saturated: the attack does not move them.
        samples: Integer.
    """

    clean: float
    noise: float
    attacked: float
    noise_difference: float
    attack_difference: float
    without_gradient: float
    samples: int


def robustness(
    model,
    x,
    y,
    loss=None,
    *,
    noise=0.1,
    epsilon=8 / 255,
    norm="inf",
    steps=10,
    step_size=None,
    bounds=(0.0, 1.0),
    batch_size=128,
    seed=0,
    verbose="auto",
):
    """The accuracy of a classifier: clean, under Gaussian noise, and under attack.

    The noisy input is `x + n`, with `n` of mean 0 and standard deviation `noise`,
    clipped to `bounds`. The attack is `bim`. Layers run in inference mode. Nothing of
    the model changes.

    Example:

    >>> robustness(model, x_test, y_test, noise=0.1, epsilon=8 / 255)

    Args:
        model, x, y, loss, epsilon, norm, steps, step_size, bounds, batch_size, verbose:
            See `bim`.
        noise: Non-negative float, in units of `x`.
        seed: Integer, of the noise.

    Returns:
        A `Robustness`.

    Raises:
        ValueError: If `noise` is negative. See also `bim`.

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
        still += np.count_nonzero(without_gradient[: batch.size])
    clean, noisy, attacked = (hits / attack.samples).tolist()
    return Robustness(
        clean=clean,
        noise=noisy,
        attacked=attacked,
        noise_difference=clean - noisy,
        attack_difference=clean - attacked,
        without_gradient=float(still / attack.samples),
        samples=attack.samples,
    )
