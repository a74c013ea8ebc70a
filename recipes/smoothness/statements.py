r"""Theorems of Santurkar et al. that need no training, on random activations.

    python -m recipes.smoothness.statements

Claims: from the first version, Theorems 3.2 and C.4, Lemma 3.3, and Theorem C.6, which
is 3.4 in full; from the later version, Theorems 4.2 and C.1. (Theorems 3.1, 4.1, 4.4,
Lemma 4.5, Facts C.1 and C.2: tests/diagnostics/test_theorems.py.) One channel, float64:
y are m activations, y^ the normalised ones, x inputs with mean zero, and g and H the
gradient and the Hessian of the loss in y^, the same in the network without BN. Each
ratio is the largest of 1,000 random cases with m from 3 to 12. It takes seconds.

All bounds on first derivatives hold. Eq. 58 of the first version is not a derivative.
Theorem C.6 lacks a division by |H|, and holds with it. Eq. 58 of the later version is
not a maximum. The table is in docs/results/statements.md.

Reference: Santurkar et al., NeurIPS 2018. https://arxiv.org/abs/1805.11604
"""

import numpy as np

from keras_norms.diagnostics import theorems
from recipes.engine import command
from recipes.engine.statements import Settings, Statement, at_most_one, write, zero


class Case:
    """Random x, other inputs, y, g and H of one channel, with mean zero where needed.

    `convex` makes H positive definite; `curved` is its size.
    """

    def __init__(self, seed, convex=False, curved=1.0):
        rng = np.random.default_rng(seed)
        self.m = m = int(rng.integers(3, 13))
        self.x, self.other = rng.normal(size=(2, m)) * rng.uniform(0.3, 3, (2, 1))
        self.x -= self.x.mean()
        self.other -= self.other.mean()
        self.y = rng.normal(rng.normal(), rng.uniform(0.3, 3), m)
        self.g = rng.normal(size=m)
        root = rng.normal(size=(m, m))
        self.H = curved * (root @ root.T if convex else root + root.T)
        self.y_hat, self.sigma = theorems.normalize(self.y)
        self.size = np.linalg.norm(self.x) * np.linalg.norm(self.other)
        self.before_bn()

    def before_bn(self):
        """Gradient and Hessian in y of the loss with BN."""
        self.at_y = theorems.gradient(self.g, self.y)
        self.bent = theorems.hessian(self.g, self.H, self.y)


def gradients(cases):
    """Theorems 3.2 and C.4: the gradient of one weight."""
    ratios, sharper, shrinking = [], [], []
    for c in cases:
        without, found = (c.g @ c.x) ** 2, (c.at_y @ c.x) ** 2
        correlation = without / (c.g @ c.g * (c.x @ c.x))
        bound = (correlation**-0.5 + 1) ** 2 / c.sigma**2 * without
        ratios.append(found / bound)
        sharper.append(found / (without / correlation / c.sigma**2))
        # C.4's deviation at epsilon = c / 2; BN's gradient is inversely proportional.
        needed = (1 + correlation**0.5) ** 2 / (correlation / 2)
        shrinking.append(found * c.sigma**2 / needed / (without / 2))
    yield at_most_one("Theorem 3.2", "squared gradient / bound", ratios)
    says = "the same with c^-1 in place of (c^-1/2 + 1)^2"
    yield at_most_one("Theorem 3.2, sharper", says, sharper)
    says = "squared gradient / (1 - epsilon / c) of the one without BN, epsilon = c / 2"
    yield at_most_one("Theorem C.4", says, shrinking)


def losses(draws):
    """Lemma 3.3: near an optimum without BN, the loss with BN is small too."""
    rng, ratios, of_epsilon = np.random.default_rng(0), [], []
    for epsilon in np.linspace(0.01, 0.49, 49):
        z, label = rng.normal(size=(2, draws, 3))
        label *= rng.uniform(1 - epsilon, 1 + epsilon, (draws, 1)) / _norm(label)
        z = label + epsilon * z / _norm(z)
        found = _norm(z / _norm(z) - label).max()
        ratios.append(found / (3 * epsilon * (1 + epsilon) / (1 - 2 * epsilon)))
        of_epsilon.append(found / epsilon)
    yield at_most_one("Lemma 3.3", "loss with BN / bound, epsilon 0.01 to 0.49", ratios)
    says = "the largest loss with BN / epsilon; the bound is above 3"
    largest = max(of_epsilon)
    yield Statement("Lemma 3.3, size", says, "at most 3", largest, largest <= 3)


def _norm(v):
    return np.linalg.norm(v, axis=-1, keepdims=True)


def hessian_entries(cases, flat):
    """Theorem C.6: second derivatives in the weights of x and of another input."""
    printed, right, bounds, corrected = [], [], [], []
    for c in cases:
        entry, (a, b) = c.x @ c.bent @ c.other, (c.x @ c.y_hat, c.other @ c.y_hat)
        u, v = c.x - a / c.m * c.y_hat, c.other - b / c.m * c.y_hat
        X, s, xx = u @ c.H @ v, c.g @ c.y_hat, c.x @ c.other / c.m
        cross = a * (c.other @ c.g) / c.m
        eq_58 = X - (2 * xx - 3 * a * b / c.m**2) * s - cross
        both = X - (xx - 3 * a * b / c.m**2) * s - cross - b * (c.x @ c.g) / c.m
        size = abs(entry) + abs(X) / c.sigma**2
        printed.append(abs(eq_58 / c.sigma**2 - entry) / size)
        right.append(abs(both / c.sigma**2 - entry) / size)
        bound = (abs(X) + 6 * c.size * np.linalg.norm(c.g)) / c.sigma**2
        bounds.append(abs(entry) / bound)
        corrected.append(shrinks(c, np.linalg.norm(c.H)))
    yield zero("Eq. 58, as printed", "largest relative error", max(printed))
    says = "the same with beta once, and the second product of alpha and g"
    yield zero("Eq. 58, corrected", says, max(right))
    yield at_most_one("Eq. 61", "second derivative / bound", bounds)
    says = "second derivative / its bound, |H| of a thousandth"
    found = [shrinks(c, 1.0) for c in flat]
    yield at_most_one("Theorem C.6, as printed", says, found)
    corrected += [shrinks(c, np.linalg.norm(c.H)) for c in flat]
    says = "the same with 6 |g| / |H| for 6 |g|, |H| of any size"
    yield at_most_one("Theorem C.6, corrected", says, corrected)


def shrinks(case, by):
    """The ratio of C.6's two sides at epsilon = d / 2, with the smallest sigma allowed.

    d, one number for both inputs, is such that the second derivative without BN is the
    paper's d |x| |other| |H|. f is 6 |g| / `by`.
    """
    without = abs(case.x @ case.H @ case.other)
    d = without / case.size / np.linalg.norm(case.H)
    needed = ((1 + d**0.5) ** 2 + 6 * np.linalg.norm(case.g) / by) / (d / 2)
    # With BN, it is inversely proportional to sigma^2.
    found = abs(case.x @ case.bent @ case.other) * case.sigma**2 / needed
    return found / (without / 2)


def curvatures(cases):
    """Theorems 4.2 and C.1 of the later version, gamma = 1, lambda = 1, H positive.

    Their conditions are <g, y^> > 0, and that H keeps the relative norms of g and of
    G, the gradient in y. In the form the proof needs: G^T H G <= g^T H g.
    """
    kept, maxima, exceeded = [], [], []
    for c in cases:
        if c.g @ c.y_hat <= 0:
            c.g = -c.g
            c.before_bn()
        along, most = c.at_y @ c.bent @ c.at_y, largest_form(c.bent, c.at_y)
        if along > 0:
            maxima.append(most / along)
        keeps = c.at_y @ c.H @ c.at_y <= c.g @ c.H @ c.g
        if np.linalg.norm(c.at_y) <= np.linalg.norm(c.g):
            kept.append(keeps)
        if keeps:
            gap = c.g @ c.y_hat / c.m * (c.at_y @ c.at_y)
            exceeded.append(most > (largest_form(c.H, c.g) - gap) / c.sigma**2)
    says = "share of cases with |G| <= |g| that have G^T H G <= g^T H g"
    found = float(np.mean(kept))
    yield Statement("Theorem 4.2, its condition", says, "assumed", found, found == 1)
    says = "median of the largest form over all |X| <= 1 / G^T H^ G"
    found = float(np.median(maxima))
    yield Statement("Eq. 58, later version", says, "1", found, abs(found - 1) < 1e-6)
    says = "share of cases, with the condition, in which the bound is exceeded"
    found = float(np.mean(exceeded))
    yield Statement("Theorem C.1", says, "0", found, found == 0)


def largest_form(A, v):
    """The largest w^T A w over w = X X^T v with |X| <= 1: a ball from 0 to v.

    By Lagrange's multiplier: the largest of u^T B u + 2 b^T u in the unit ball.
    """
    radius = np.linalg.norm(v) / 2
    values, vectors = np.linalg.eigh(radius**2 * A)
    b = radius * vectors.T @ A @ v / 2
    low = max(values.max(), 0)
    high = low + np.linalg.norm(b) + 1
    for _ in range(100):
        mu = (low + high) / 2
        low, high = (mu, high) if np.linalg.norm(b / (mu - values)) > 1 else (low, mu)
    u = b / (high - values)
    return (values * u) @ u + 2 * b @ u + v @ A @ v / 4


def run(settings):
    """Computes everything; returns the directory with table.md and results.json."""
    seeds = range(settings.draws)
    cases = [Case(seed) for seed in seeds]
    found = [
        *gradients(cases),
        *losses(settings.draws),
        *hessian_entries(cases, [Case(seed, curved=1e-3) for seed in seeds]),
        *curvatures([Case(seed, convex=True) for seed in seeds]),
    ]
    return write("statements_smoothness", found, settings)


if __name__ == "__main__":
    command.run(run, Settings)
