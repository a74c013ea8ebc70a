"""Statements of the CBN paper that need no training, or a few steps of it.

    python -m recipes.cbn.statements

Claims: Theorem 1, that SGD converges; Lemmas 1, 2 and 4; the steps of Lemma 3, from
which Theorem 2 follows, that mean removal lowers bounds on gradients; Eq. 14, that BN
before ReLU equals the l2 norm after it with rho = sqrt 2; Theorem 3's assumption
0 < tau < 1; Remark 2, that squared gradients grow with the depth of a plain network,
and their bounds scale as 1 / rho^2; Appendix I, that the bias of an average of old
statistics is proportional to the learning rate.

NumPy, float64, except for Remark 2: a network of Dense layers of 64 with CBN before
each, a loss whose gradient at the output is constant, as in the theorems, and Glorot's
weights. Appendix I is a tanh network with one hidden layer on digits; every rate ends
at the same learning rate x steps, 0.5. It takes half a minute.

Theorem 1 holds, also without its term T2. Lemmas 3 and 4 hold for gradients (Lemma 3
with tanh and ReLU, without shortcuts), but not for Hessians: their proofs leave out a
term. With ReLU, squared gradients scale exactly as 1 / rho^2, and grow with depth by
the same factor per layer for any rho; with tanh and sigmoid the first layers see rho
more than once. AMAT's bias is the same at all rates, because its averages cover the
same learning rate x steps. The table is in docs/results/statements.md.

Reference: Peng, Yu and Yu, TPAMI 2023, https://doi.org/10.1109/TPAMI.2023.3319005
"""

import collections

import keras
import numpy as np
from keras import layers
from scipy.special import expit, softmax

from keras_norms import CBN, diagnostics
from recipes.engine import command, data
from recipes.engine.statements import Settings, Statement, at_most_one, write, zero

SQUARES_OF_RHO = (1.0, 4.0, 16.0, 64.0)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
WAY = 0.5  # learning rate x steps
DEPTH = 10
_ACTIVATIONS = {"sigmoid": expit, "tanh": np.tanh, "relu": lambda y: np.maximum(y, 0)}


def convergence(draws):
    """Theorem 1, Eq. 3, on least squares, where L and the smallest loss are known."""
    rng, ratios, without = np.random.default_rng(0), [], []
    for _ in range(draws):
        n, d, steps = rng.integers(2, 30, size=3)
        x, y, w, v = (rng.normal(size=s) for s in ((n, d), n, d, d))
        lipschitz, decay = np.linalg.norm(x, 2) ** 2 / n, rng.uniform()
        rates = np.sort(rng.uniform(0.5, 1, size=steps))[::-1] / lipschitz
        way = 2 * (_loss(x, y, w) - _loss(x, y, np.linalg.lstsq(x, y)[0]))
        slopes, squares, errors = [], 0.0, 0.0
        for rate in rates:
            slope, i = x.T @ (x @ w - y) / n, rng.integers(n)
            v = decay * v + (1 - decay) * x[i] * (x[i] @ w - y[i])
            slopes.append(np.linalg.norm(slope))
            squares += rate * _squares(v)
            errors += rate * _squares(v - slope)
            w = w - rate * v
        found = np.mean(slopes) ** 2 * steps * rates[-1]
        ratios.append(found / (way + squares + errors))
        without.append(found / (way + errors))
    says = "(mean norm of the gradient)^2 / (T1 + T2 + T3), SGD on least squares"
    yield at_most_one("Theorem 1", says, ratios)
    yield at_most_one("Theorem 1 without T2", "the same / (T1 + T3)", without)


def _loss(x, y, w):
    return np.mean((x @ w - y) ** 2) / 2


def lemmas(draws):
    """Lemmas 1, 2 and 4."""
    rng, errors = np.random.default_rng(0), []
    for _ in range(20):
        A, Z, B, C = (rng.normal(size=s) for s in ((3, 4), (4, 2), (2, 5), (3, 5)))
        H = rng.normal(size=(15, 15))
        H += H.T

        def slope(z, A=A, B=B, C=C, H=H, shape=Z.shape):
            """The gradient in Z of u^T H u / 2 + sum(u^3) / 6, u a vector."""
            u = (A @ z.reshape(shape, order="F") @ B + C).ravel(order="F")
            g = (H @ u + u**2 / 2).reshape(C.shape, order="F")
            return (A.T @ g @ B.T).ravel(order="F")

        at_u = H + np.diag((A @ Z @ B + C).ravel(order="F"))
        formula = np.kron(B, A.T) @ at_u @ np.kron(B.T, A)
        z, steps = Z.ravel(order="F"), 1e-3 * np.eye(Z.size)
        # Central differences of a quadratic equal its derivative.
        found = np.array([(slope(z + s) - slope(z - s)) / 2e-3 for s in steps])
        errors.append(np.abs(found - formula).max() / np.abs(formula).max())
    says = "largest relative error, 20 functions of A Z B + C"
    yield zero("Lemma 1", says, max(errors))

    norms = []
    for n in range(2, 40):
        a = rng.normal(size=n)
        norms.append(np.linalg.norm(np.eye(n) - np.outer(a, a) / (a @ a), 2))
    says = "norm of I - a a^T less 1, 2 to 39 elements"
    yield zero("Lemma 2", says, np.ptp([*norms, 1]))

    gradients, hessians = [], []
    for _ in range(draws):
        n = int(rng.integers(2, 9))
        z, g, H = rng.normal(size=n), rng.normal(size=n), rng.normal(size=(n, n))
        H += H.T
        r = np.linalg.norm(z)
        u = z / r
        J = (np.eye(n) - np.outer(u, u)) / r
        gradients.append(np.linalg.norm(J @ g) * r / np.linalg.norm(g))
        # What the proof leaves out: the derivative of J.
        c = J @ g
        more = np.outer(c, u) + np.outer(u, c) + (g @ u) * J
        found = J @ H @ J - more / r
        hessians.append(np.linalg.norm(found, 2) * r**2 / np.linalg.norm(H, 2))
    yield at_most_one(
        "Lemma 4, Eq. 67", "gradient in z / (gradient in u / |z|)", gradients
    )
    says = "Hessian in z / (Hessian in u / |z|^2), spectral norms"
    yield at_most_one("Lemma 4, Eq. 68", says, hessians)


def mean_removal(draws):
    """The steps of Lemma 3 (Appendix D), of which the proof of Theorem 2 consists."""
    rng, ratios = np.random.default_rng(0), collections.defaultdict(list)
    for _ in range(draws):
        n, d = rng.integers(2, 9, size=2)
        x, g = rng.normal(rng.normal(size=d), size=(n, d)), rng.normal(size=(n, d))
        eta, w = rng.uniform(0, 2, size=d), rng.normal(size=(d, d)) * rng.uniform()
        shifted = x - eta * x.mean(0)
        y, norm = shifted @ w.T, np.linalg.norm(w, 2)
        ratios["Eq. 29"].append(_squares(shifted) / _squares(x))
        ratios["Eq. 41"].append(_squares(g - g.mean(0)) / _squares(g))
        for name, act in _ACTIVATIONS.items():
            ratio = _squares(act(y)) / (norm**2 * _squares(x))
            ratios[f"Eq. 32, {name}"].append(ratio)
        ratio = _squares(x + _ACTIVATIONS["relu"](y)) / ((1 + norm**2) * _squares(x))
        ratios["Eq. 32, relu, shortcut"].append(ratio)
        ratios["Eq. 47"].append(_hessian_below_tanh(w + w.T, g[0], y[0]))
    block = "squares of a block's output / (|w|^2 x those of its input)"
    says = {
        "Eq. 29": "squares of x - eta E x / those of x, 0 <= eta <= 2",
        "Eq. 41": "squared gradient below / above the mean removal",
        "Eq. 32, relu, shortcut": "the same with a shortcut, and 1 + |w|^2",
        "Eq. 47": "Hessian below / above tanh, spectral norms",
    }
    for equation, values in ratios.items():
        yield at_most_one(f"Lemma 3, {equation}", says.get(equation, block), values)


def _hessian_below_tanh(H, g, y):
    """Norm of the Hessian of f(tanh(y)) / that of H, for f with gradient g, Hessian H.

    The paper leaves out the second term.
    """
    slope = 1 - np.tanh(y) ** 2
    found = np.outer(slope, slope) * H - np.diag(2 * np.tanh(y) * slope * g)
    return np.linalg.norm(found, 2) / np.linalg.norm(H, 2)


def _squares(x):
    return np.square(x).sum()


def relu_after_bn():
    """Eq. 14, and the sizes that Theorem 3 needs of rho."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=500)
    rho = rho_of_relu(np.r_[half, -half])
    yield zero("Eq. 14, symmetric", "rho of BN and ReLU less sqrt 2", rho - 2**0.5)
    x = data.load("digits").x_train.reshape(1437, -1).astype("float64")
    units = x @ rng.normal(size=(x.shape[1], 1000))
    found = [rho_of_relu(unit) for unit in units.T]
    off = np.abs(np.array(found) - 2**0.5)
    for name, value in (("median", np.median(off)), ("largest", off.max())):
        says = f"{name} |rho - sqrt 2| of 1,000 random units on digits"
        yield Statement(f"Eq. 14, {name}", says, "0", float(value), value < 0.1)
    x = keras.ops.convert_to_tensor(rng.normal(size=100_000))
    for name in ("sigmoid", "tanh", "relu", "selu", "swish"):
        y = keras.ops.convert_to_numpy(keras.activations.get(name)(x))
        says = f"tau at rho = 1, {name} of N(0, 1)"
        tau = float(1 / y.std(dtype="float64"))
        yield Statement(f"Theorem 3, {name}", says, "below 1", tau, tau < 1)


def rho_of_relu(y):
    """The rho that makes relu(BN(y)) the l2 norm, by rho, of relu(y - mean)."""
    y = y - y.mean()
    return float(np.sqrt(np.mean(y**2) / np.mean(np.maximum(y, 0) ** 2)))


def depth_and_rho(activation, width=64):
    """Squared gradients of each layer of a plain network, a row for each rho."""
    keras.utils.set_random_seed(0)
    x = inputs = layers.Input((width,))
    for i in range(DEPTH):
        x = CBN()(layers.Activation(activation)(x))
        x = layers.Dense(width, name=f"dense{i}")(x)
    model, found = keras.Model(inputs, x), []
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 128, width)).astype("float32")
    for square in SQUARES_OF_RHO:
        for layer in model.layers:
            if isinstance(layer, CBN):
                layer.rho.assign(square**0.5)
        _, gradients = diagnostics.value_and_grad(model, x, y, _linear)
        paths = [v.path for v in model.trainable_variables]
        kernels = [g for g, p in zip(gradients, paths) if p.endswith("kernel")]
        found.append([float(np.square(g, dtype="float64").sum()) for g in kernels])
    return np.array(found)


def _linear(y_true, y_pred):
    """A loss whose gradient in the output does not depend on the output."""
    return keras.ops.sum(y_true * y_pred, -1)


def remark_2():
    for activation in ("relu", "tanh", "sigmoid"):
        squares = depth_and_rho(activation)
        for name, layer in (("last", -1), ("first", 0)):
            slope = exponent(SQUARES_OF_RHO, squares[:, layer])
            item = f"Remark 2, {activation}, {name} layer"
            says = "exponent of rho^2 in the squared gradient, rho 1 to 8"
            yield Statement(item, says, "-1", slope, abs(slope + 1) < 0.05)
        for square, of in zip(SQUARES_OF_RHO[::3], squares[::3]):
            growth = (of[0] / of[-1]) ** (1 / (DEPTH - 1))
            says = "growth of the squared gradient a layer, downwards"
            item = f"Remark 2, {activation}, depth, rho = {square**0.5:g}"
            if square == 1:
                yield Statement(item, says, "above 1", growth, growth > 1)
            else:
                yield Statement(item, says, "1", growth, growth < 1.05)


def exponent(x, y):
    """The n for which y scales as x^n."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def bias_of_averages():
    """Appendix I: |bias| of the mean of a hidden layer after the same `WAY`."""
    found = exponent(RATES, [bias(rate, 0.9) for rate in RATES])
    item, says = "Appendix I, eta = 0.9", "exponent of the rate in the bias"
    yield Statement(item, says, "1", found, abs(found - 1) < 0.25)
    found = exponent(RATES, [bias(rate, 1 - 10 * rate) for rate in RATES])
    item, says = "Appendix I, AMAT", "the same with eta = 1 - 10 rate"
    yield Statement(item, says, "not said", found, abs(found) < 0.25)


def bias(rate, eta, batch=128, hidden=32):
    """|sum_s (1 - eta) eta^(k-s) (mu_s - mu_(s to k))|, Eq. 109."""
    rng, images = np.random.default_rng(0), data.load("digits")
    x = images.x_train.reshape(1437, -1).astype("float64")
    y = np.eye(10)[images.y_train]
    w = [rng.normal(size=s) / s[0] ** 0.5 for s in ((64, hidden), (hidden, 10))]
    seen = []
    for _ in range(round(WAY / rate)):
        chosen = rng.integers(len(x), size=batch)
        h = np.tanh(x[chosen] @ w[0])
        error = (softmax(h @ w[1], axis=1) - y[chosen]) / batch
        seen.append((chosen, h.mean(0)))
        slopes = x[chosen].T @ ((error @ w[1].T) * (1 - h**2)), h.T @ error
        w = [weight - rate * slope for weight, slope in zip(w, slopes)]
    ages = np.arange(len(seen))[::-1]
    old = [mean - np.tanh(x[chosen] @ w[0]).mean(0) for chosen, mean in seen]
    return np.linalg.norm((1 - eta) * eta**ages @ np.array(old))


def run(settings):
    """Computes everything; returns the directory with table.md and results.json."""
    found = [
        *convergence(settings.draws),
        *lemmas(settings.draws),
        *mean_removal(settings.draws),
        *relu_after_bn(),
        *remark_2(),
        *bias_of_averages(),
    ]
    return write("statements_cbn", found, settings)


if __name__ == "__main__":
    command.run(run, Settings)
