"""Statements of Zhou et al. that need no training, in NumPy, float64.

    python -m recipes.blindness.statements

Claims: Theorem 3, part 2, element by element; that gamma absorbs the part of the first
order that BN does not pass; Appendix F, that derivatives of -log sigmoid of order three
and higher are small where a classification is confident; Appendix G, that for a ReLU
network, which has no second derivatives, the theorems hold for a finite-difference
Hessian. (Theorems 1 to 3, Corollary 1: recipes/blindness/layers.py.) It takes seconds.

It is beta that absorbs the first order; gamma gets nothing of it, and absorbs the
diagonal second order. The third derivative of -log sigmoid vanishes no faster than the
second. The table is in docs/results/statements.md.

Reference: Zhou et al., 2022, https://arxiv.org/abs/2205.15146
"""

import numpy as np
from numpy.polynomial import polynomial

from keras_norms.diagnostics import theorems
from recipes.engine import command
from recipes.engine.statements import Settings, Statement, write, zero

SAMPLES, FEATURES = 50, 8


def batch_normalized():
    """x of `(features, samples)` and y = BN(x), correlated features."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(FEATURES, FEATURES)) @ rng.normal(size=(FEATURES, SAMPLES))
    x = mixed + rng.normal(size=(FEATURES, 1))
    return rng, x, np.array([theorems.normalize(row)[0] for row in x])


def theorem_3():
    """d2 L_non / dx_d dH_d, each row of Y_non / sigma_d, against the Jacobian."""
    rng, x, y = batch_normalized()
    error, linear = 0.0, 0.0
    for d, row in enumerate(x):
        H, o = rng.normal(size=FEATURES), y[d] / np.linalg.norm(y[d])
        of_linear = np.outer(y @ o, o)
        J, sigma = theorems.jacobian(row), row.std()
        found = np.array([J @ each for each in y - of_linear])
        error = max(error, np.abs(found - (y - of_linear) / sigma).max() * sigma)
        linear = max(linear, np.abs(J @ (H @ of_linear)).max() * sigma)
    yield zero("Theorem 3, linear part", "largest element at the input", linear)
    yield zero("Theorem 3, part 2", "largest error of its elements", error)


def affine_weights():
    """Gradients in gamma and beta, z = gamma y + beta, of the terms of a loss in z."""
    rng, _, y = batch_normalized()
    g, H = rng.normal(size=(2, FEATURES))
    gamma, beta = rng.normal(1, 0.3, FEATURES), rng.normal(size=FEATURES)
    z = gamma[:, None] * y + beta[:, None]
    first = np.tile(g[:, None], SAMPLES)  # of sum g (z - z~)
    diagonal = H[:, None] * (z - beta[:, None])  # of sum H (z - z~)^2 / 2, z~ = beta
    for item, slope, size in (("first order", first, g), ("diagonal", diagonal, H)):
        of_gamma = np.abs((slope * y).sum(1) / size).max() / SAMPLES
        of_beta = np.abs(slope.sum(1) / size).max() / SAMPLES
        for name, found in (("gamma", of_gamma), ("beta", of_beta)):
            says = f"gradient of {name}, largest, over its size in the loss"
            said = "not 0" if item == "first order" and name == "gamma" else "not said"
            holds = found > 1e-9 if said == "not 0" else True
            yield Statement(f"{name}, {item}", says, said, float(found), bool(holds))


def numerators(orders):
    """Coefficients of N_1, ...: L = -log sigmoid, L^(m) = N_m(e^z) / (1 + e^z)^m."""
    found = [np.array([-1.0])]
    for m in range(1, orders):
        up = polynomial.polymul([0, 1, 1], polynomial.polyder(found[-1]))
        found.append(polynomial.polysub(up, m * polynomial.polymulx(found[-1])))
    return found


def appendix_f():
    """The derivatives of -log sigmoid, against Cauchy's integrals around a point."""
    found, error, leading = numerators(6), 0.0, 0.0

    def at(z, m):
        return polynomial.polyval(np.exp(z), found[m - 1]) / (1 + np.exp(z)) ** m

    circle = np.exp(2j * np.pi * np.arange(256) / 256)
    for z in (-4.0, -0.5, 1.0, 4.0):
        coefficients = np.fft.fft(np.log1p(np.exp(-(z + circle)))) / 256
        factorial = 1.0
        for m, numerator in enumerate(found, start=1):
            factorial *= m
            error = max(error, abs(coefficients[m].real * factorial - at(z, m)))
            last = numerator[m - 1] - (-1) ** m
            leading = max(leading, abs(last), *np.abs(numerator[m:]), 0.0)
    says = "coefficient of e^((m-1)z) less (-1)^m"
    yield zero("Appendix F, leading term", says, leading)
    yield zero("Appendix F, derivatives", "largest error, orders 1 to 6", error)
    for z in (5.0, 10.0):
        third = abs(at(z, 3))
        says = f"third derivative at z = {z:g}"
        yield Statement(f"Appendix F, z = {z:g}", says, "small", third, third < 0.01)
    ratio = abs(at(10.0, 3) / at(10.0, 2))
    says = "the third over the second at z = 10"
    yield Statement("Appendix F, ratio", says, "not said", ratio, True)


def appendix_g():
    """Differences of the gradient of a ReLU network in y, linear at the output."""
    rng, x, y = batch_normalized()
    a, b = rng.normal(size=(FEATURES, 64)) / 2, rng.normal(size=(64, 64)) / 6
    c, shift = rng.normal(size=64) / 6, rng.normal(size=(2, 64))

    def gradient(y):
        first = y @ a + shift[0]
        second = np.maximum(first, 0) @ b + shift[1]
        return a @ ((first > 0) * (b @ ((second > 0) * c)))

    def hessian(step):
        found = [gradient(s) - gradient(-s) for s in step * np.eye(FEATURES)]
        return np.add(found, np.transpose(found)) / (4 * step)

    H = hessian(0.5)  # of the deviation of y
    size, off = np.abs(H).max(), H - np.diag(np.diag(H))
    blocked = passed = 0.0
    for d, row in enumerate(x):
        J = theorems.jacobian(row) * row.std() / size
        blocked = max(blocked, np.abs(J @ (H[d, d] * y[d])).max())
        passed = max(passed, np.abs(J @ (off[d] @ y)).max())
    bent = np.abs(hessian(1e-9)).max()
    yield zero("Appendix G, derivatives", "largest second derivative", bent)
    says = "the same by differences of half a deviation"
    yield Statement("Appendix G, differences", says, "not 0", size, size > 1e-3)
    yield zero("Appendix G, diagonal", "what arrives of it, over its size", blocked)
    says = "the same of the off-diagonal part"
    yield Statement("Appendix G, off-diagonal", says, "not 0", passed, passed > 1e-3)


def run(settings):
    """Computes everything; returns the directory with table.md and results.json."""
    found = [*theorem_3(), *affine_weights(), *appendix_f(), *appendix_g()]
    return write("statements_blindness", found, settings)


if __name__ == "__main__":
    command.run(run, Settings)
