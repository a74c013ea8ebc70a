"""Statements of Sun et al. that need no training, on random data, float64.

    python -m recipes.spheres.statements

Claims: Eq. 10, BN's outputs lie on a sphere; rank(Sigma_X) <= min(n, B), and its kernel
has n - B dimensions or more, in or near which W lies "with very high probability" if B
<< n; B = 2 gives +-1 and no gradient (Section 2.2); Eq. 13, LN centres the rows of W,
then projects onto the sphere; Eq. 15, spectral normalisation; BN is WN if Sigma_X = I
(Section 2.4); kernels are orthogonal to their gradients, and a step adds its square to
their squared norm (Lemmas 2 and 3, Section 5.5); <dL/dy, y^> = 0 (Section 5.4), in
Theorem 4.1 of Santurkar et al. too (Section 2.5); large kernels amplify an attack
(Section 3.2). Layers are those of Keras and keras_norms, epsilon 1e-12. (Lemma 1, Eqs.
12, 14 and WS: tests/ops/test_weight_norms.py, tests/diagnostics/test_geometry.py.) It
takes seconds.

All identities hold but that of Section 2.5; the rank is min(n, B - 1). But W does not
lie near the kernel: in a batch of B, a unit's output has (B - 1) / B of its variance
over all data, for any n. And where a network is invariant to the scale of a kernel, the
attack is too. The table is in docs/results/statements.md.

Reference: Sun et al., AAAI 2020. https://doi.org/10.1609/aaai.v34i04.6046
"""

import keras
import numpy as np
from keras import layers, ops

from keras_norms import CWN, WN, WS
from keras_norms.diagnostics import bim, theorems, value_and_grad
from recipes.engine import command
from recipes.engine.precision import available, precision
from recipes.engine.statements import Settings, Statement, at_most_one, write, zero

INPUTS, UNITS = 16, 6


def data(samples, seed=0):
    """X of `(samples, INPUTS)`, correlated, and W of `(INPUTS, UNITS)`."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(INPUTS, INPUTS))
    X = rng.normal(size=(samples, INPUTS)) @ mixing + rng.normal(size=INPUTS)
    return rng, X, rng.normal(size=(INPUTS, UNITS))


def value(layer, x, **options):
    """A layer's output, as an array."""
    return ops.convert_to_numpy(layer(ops.convert_to_tensor(x), **options))


def same(item, says, error):
    """`zero`, in the current precision of Keras."""
    wide = keras.config.floatx() == "float64"
    return zero(item, says, float(np.max(error)), 1e-6 if wide else 1e-3)


def spheres():
    """Eqs. 10, 13 and 15, and Sigma_X = I."""
    rng, X, W = data(64)
    gamma, beta = rng.normal(size=(2, UNITS))
    bn = layers.BatchNormalization(epsilon=1e-12)
    bn.build((None, UNITS))
    bn.gamma.assign(gamma)
    bn.beta.assign(beta)
    found = np.square(value(bn, X @ W, training=True)).sum(0)
    error = np.abs(found / (64 * (gamma**2 + beta**2)) - 1)
    yield same("Eq. 10", "error of the squared norm of BN's outputs", error)
    order = rng.permutation(64)
    moved = value(bn, X[order] @ W, training=True)
    error = np.abs(moved - value(bn, X @ W, training=True)[order])
    yield same("Section 2.2, order", "BN of permuted samples less permuted BN", error)

    ln = layers.LayerNormalization(epsilon=1e-12)
    found = value(ln, X @ W)
    Y = X @ (W - W.mean(1, keepdims=True))
    error = np.abs(found - UNITS**0.5 * Y / np.linalg.norm(Y, axis=1, keepdims=True))
    yield same("Eq. 13", "LN less rows of W centred, then the sphere", error)
    moved = value(ln, 3 * X @ (2 * W + rng.normal(size=(INPUTS, 1))))
    error = np.abs(found - moved)
    yield same("Section 2.3", "change by scales of W and X, and a shift of rows", error)

    sn = layers.SpectralNormalization(layers.Dense(UNITS, use_bias=False), 200)
    sn.build((None, INPUTS))
    sn.layer.kernel.assign(W)
    error = np.abs(value(sn, X, training=True) - X @ W / np.linalg.norm(W, 2))
    yield same("Eq. 15", "SN less W / its largest singular value", error)

    # White: of mean 0 and with the identity as its covariance.
    X -= X.mean(0)
    values, vectors = np.linalg.eigh(X.T @ X / len(X))
    white = X @ vectors / values**0.5
    wn = WN(layers.Dense(UNITS, use_bias=False), epsilon=1e-12)
    wn.build((None, INPUTS))
    wn.layer.kernel.assign(W)
    wn.gains["kernel"].assign(np.ones(UNITS))
    bn = layers.BatchNormalization(epsilon=1e-12)
    error = np.abs(value(bn, white @ W, training=True) - value(wn, white))
    yield same("Section 2.4, Sigma_X = I", "BN less WN with g = 1", error)


def invariances():
    """Section 2.5: the scale of a kernel does not matter."""
    _, X, W = data(64)
    X = X.reshape(8, 8, INPUTS)
    norms = {
        "BN": layers.BatchNormalization(epsilon=1e-12),
        "LN": layers.LayerNormalization(epsilon=1e-12),
        "IN": layers.GroupNormalization(-1, epsilon=1e-12),
        "GN": layers.GroupNormalization(3, epsilon=1e-12),
    }
    found = {
        name: [value(norm, X @ (scale * W), training=True) for scale in (1, 3)]
        for name, norm in norms.items()
    }
    for kind in (WN, CWN, WS):
        layer = kind(layers.Dense(UNITS, use_bias=False), epsilon=1e-12)
        layer.build(X.shape)
        found[kind.__name__] = pair = []
        for scale in (1, 3):
            layer.layer.kernel.assign(scale * W)
            pair.append(value(layer, X))
    for name, (one, three) in found.items():
        says = "change of the outputs by a kernel times 3"
        yield same(f"Section 2.5, {name}", says, np.abs(one - three))


def kernels():
    """Lemmas 2 and 3, and an attack (Section 3.2), on a kernel before a norm."""
    keras.utils.set_random_seed(0)
    rng, X, _ = data(64)
    X, labels = X.reshape(8, 8, INPUTS), rng.integers(UNITS, size=8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    norms = {
        "BN": layers.BatchNormalization(epsilon=1e-12),
        "LN": layers.LayerNormalization((1, 2), epsilon=1e-12),
        "GN": layers.GroupNormalization(3, epsilon=1e-12),
    }
    for name, norm in norms.items():
        conv = layers.Conv1D(UNITS, 3, use_bias=False)
        tail = [layers.Activation("tanh"), layers.Flatten(), layers.Dense(UNITS)]
        model = keras.Sequential([keras.Input(X.shape[1:]), conv, norm, *tail])
        kernel = ops.convert_to_numpy(conv.kernel)
        step = 0.1 * value_and_grad(model, X, labels, loss).gradient[0]
        norm_of, step_norm = np.linalg.norm(kernel), np.linalg.norm(step)
        cosine = abs(np.sum(kernel * step)) / (norm_of * step_norm)
        yield same(f"Lemma 2, {name}", "cosine of a kernel and its gradient", cosine)
        grown = np.sum((kernel - step) ** 2) / (norm_of**2 + step_norm**2)
        says = "a step's squared norm of a kernel less the sum of squares"
        yield same(f"Lemma 3, {name}", says, abs(grown - 1))
    attack = {"epsilon": 0.1, "norm": 2, "bounds": None, "verbose": 0}
    images = bim(model, X, labels, loss, **attack)
    conv.kernel.assign(100 * kernel)
    change = np.abs(bim(model, X, labels, loss, **attack) - images)
    says = "change of BIM's inputs, epsilon 0.1, by a kernel before GN times 100"
    yield Statement("Section 3.2", says, "not 0", change.max(), change.max() > 1e-6)


def small_batches(draws):
    """The rank of Sigma_X, what W has to do with its kernel, and B = 2."""
    ranks, share = [], []
    for batch in range(2, 40):
        _, X, _ = data(batch, seed=batch)
        rank = np.linalg.matrix_rank(np.cov(X.T, bias=True))
        ranks.append(rank / min(INPUTS, batch))
        share.append(rank - min(INPUTS, batch - 1))
    yield at_most_one("Section 2.2, rank", "rank / min(n, B), B 2 to 39", ranks)
    yield zero("Section 2.2, its value", "rank - min(n, B - 1)", np.abs(share).max())
    for batch in (2, 4, 16):
        # W's outputs for normal inputs, over their deviation: for n of any size.
        y = np.random.default_rng(batch).normal(size=(draws, batch))
        near = float((y.std(1) < 0.01).mean())
        says = f"share of units with deviation below 1 % in a batch of {batch}"
        item = f"Section 2.2, W, B = {batch}"
        yield Statement(item, says, "near 1", near, near > 0.9)
    _, X, W = data(2)
    bn = layers.BatchNormalization(epsilon=1e-12)
    error = np.abs(np.abs(value(bn, X @ W, training=True)) - 1).max()
    yield same("Section 2.2, B = 2", "outputs less +-1", error)
    error = np.abs(theorems.jacobian((X @ W)[:, 0])).max()
    says = "largest element of BN's Jacobian, B = 2"
    yield zero("Section 2.2, gradient", says, error)


def orthogonal(draws):
    """Section 5.4, and Section 2.5 on the gradient without BN."""
    rng, found, without = np.random.default_rng(0), [], []
    for _ in range(draws):
        y, g = rng.normal(size=(2, 8))
        y_hat, _ = theorems.normalize(y)
        at_y = theorems.gradient(g, y)
        found.append(abs(at_y @ y_hat) / np.linalg.norm(at_y))
        without.append(abs(g @ y_hat) / np.linalg.norm(g))
    yield zero("Section 5.4", "<dL/dy, y^> / |dL/dy|, largest", max(found))
    says = "the same of the gradient without BN, which Theorem 4.1 has"
    yield zero("Section 2.5, Theorem 4.1", says, max(without))


def run(settings):
    """Computes everything; returns the directory with table.md and results.json."""
    with precision(available()[-1]):
        found = [*spheres(), *invariances(), *kernels()]
        found += [*small_batches(settings.draws), *orthogonal(settings.draws)]
    return write("statements_spheres", found, settings)


if __name__ == "__main__":
    command.run(run, Settings)
