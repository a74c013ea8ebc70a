"""What batch normalization does to gradients, exactly (Santurkar et al., Section 4).

Functions of arrays, in float64, for one channel: `y` is the vector of the `m` elements
that it normalises, and

```
y_hat = (y - mean(y)) / sigma        sigma = sqrt(var(y))        z = gamma y_hat + beta
```

`g` is the gradient of a loss with respect to `z`, which is also the gradient with
respect to `y` of the network without normalisation that has the same activations there.
No epsilon is in these formulas, so `y` must not be constant. An argument that is not
finite, or of another shape, is a ValueError.

Reference:

- Santurkar, Tsipras, Ilyas and Madry, How Does Batch Normalization Help Optimization?,
  NeurIPS 2018, Section 4 and Appendix C, and Theorem C.3 of the first version.
  https://arxiv.org/abs/1805.11604
"""

import numpy as np

from keras_norms._checks import arguments
from keras_norms._types import Tensor
from keras_norms.diagnostics.geometry import decompose


def normalize(y: Tensor) -> tuple[np.ndarray, float]:
    """Compute `y_hat` and `sigma`."""
    y = _array("y", y)
    found = decompose(y)
    if not found.gamma > 0:
        raise arguments.wrong("y", "a vector that is not constant", y)
    return found.direction, float(found.gamma)


def _array(name, value, ndim=1, m=None):
    """Return a vector or a square matrix, of `m` elements an axis, in float64."""
    found = arguments.array(name, value).astype("float64")
    shape = found.shape[:1] * ndim if m is None else (m,) * ndim
    if found.shape != shape or not found.ndim or not np.all(np.isfinite(found)):
        what = "a vector" if m is None else f"an array of shape {shape}"
        raise arguments.wrong(name, f"{what} of finite numbers", found)
    return found


def _checked(g, gamma, y):
    """Check the arguments; return `g`, `gamma`, the two of `normalize`, and `m`."""
    y_hat, sigma = normalize(y)
    g = _array("g", g, m=y_hat.size)
    return g, arguments.number("gamma", gamma), y_hat, sigma, y_hat.size


def jacobian(y: Tensor, gamma: float = 1.0) -> np.ndarray:
    """Fact C.2: `dz_b / dy_k`, of shape `(m, m)`.

    ```
    gamma / sigma * (1[b = k] - 1/m - y_hat_b y_hat_k / m)
    ```
    """
    gamma = arguments.number("gamma", gamma)
    y_hat, sigma = normalize(y)
    m = y_hat.size
    return gamma / sigma * (np.eye(m) - 1 / m - np.outer(y_hat, y_hat) / m)


def gradient(g: Tensor, y: Tensor, gamma: float = 1.0) -> np.ndarray:
    """Fact C.1: the gradient with respect to `y`, from the one with respect to `z`.

    ```
    gamma / (m sigma) * (m g - sum(g) - y_hat <g, y_hat>)
    ```
    """
    g, gamma, y_hat, sigma, m = _checked(g, gamma, y)
    return gamma / (m * sigma) * (m * g - np.sum(g) - y_hat * (g @ y_hat))


def squared_gradient(g: Tensor, y: Tensor, gamma: float = 1.0) -> float:
    """Theorem 4.1, which its proof (Eq. 9) shows to be an equality.

    ```
    gamma^2 / sigma^2 * (|g|^2 - <1, g>^2 / m - <g, y_hat>^2 / m)
    ```

    Returns:
        The squared norm of the gradient with respect to `y`.
    """
    g, gamma, y_hat, sigma, m = _checked(g, gamma, y)
    left = g @ g - np.sum(g) ** 2 / m - (g @ y_hat) ** 2 / m
    return gamma**2 / sigma**2 * left


def curvature(g: Tensor, hessian: Tensor, y: Tensor, gamma: float = 1.0) -> float:
    """Theorem 4.2, which its proof (Eq. 50) shows to be an equality.

    With `G` the gradient with respect to `y` and `H` the Hessian with respect to `z`:

    ```
    gamma^2 / sigma^2 * G^T H G - gamma / (m sigma^2) * <g, y_hat> |G|^2
    ```

    Args:
        hessian: Array of shape `(m, m)`, `H`.

    Returns:
        The quadratic form `G^T (d^2 L / dy dy) G`.
    """
    g, gamma, y_hat, sigma, m = _checked(g, gamma, y)
    hessian = _array("hessian", hessian, 2, m)
    G = gradient(g, y, gamma)
    scaled = gamma**2 / sigma**2 * (G @ hessian @ G)
    return scaled - gamma / (m * sigma**2) * (g @ y_hat) * (G @ G)


def hessian(g: Tensor, hessian: Tensor, y: Tensor, gamma: float = 1.0) -> np.ndarray:
    """Eqs. 41-42: the Hessian with respect to `y`, from the one with respect to `z`.

    With `P = I - 1 1^T / m - y_hat y_hat^T / m` and `c = g - mean(g)`:

    ```
    gamma^2 / sigma^2 * (P H P - (c y_hat^T + y_hat c^T
        - 3/m <g, y_hat> y_hat y_hat^T + <g, y_hat> (I - 1 1^T / m)) / (m gamma))
    ```
    """
    g, gamma, y_hat, sigma, m = _checked(g, gamma, y)
    hessian = _array("hessian", hessian, 2, m)
    centring = np.eye(m) - 1 / m
    projection = centring - np.outer(y_hat, y_hat) / m
    centred, product = g - np.mean(g), g @ y_hat
    bent = (
        np.outer(centred, y_hat)
        + np.outer(y_hat, centred)
        - 3 / m * product * np.outer(y_hat, y_hat)
        + product * centring
    )
    flat = gamma**2 * projection @ hessian @ projection
    return (flat - gamma / m * bent) / sigma**2


def weight_gradient_bound(
    g: Tensor, y: Tensor, largest: float, gamma: float = 1.0
) -> tuple[float, float]:
    """Theorem 4.4: the largest squared gradient of a unit's weights `w`, `y = X w`.

    Over all inputs `X` with spectral norm at most `largest`, at the same `y` and `g`:

    ```
    without    largest^2 |g|^2
    with       largest^2 gamma^2 / sigma^2 * (|g|^2 - m mean(g)^2 - <g, y_hat>^2 / m)
    ```

    The theorem as printed subtracts `largest^2 <g, y_hat>^2`, without `1/m`, and its
    Eq. 17 has `1/sqrt(m)`. Neither follows from Theorem 4.1, nor holds. It also squares
    the first bound once more, and its `m mean(g)^2` lacks `largest^2`.

    Returns:
        The bound without and with normalisation.
    """
    largest = arguments.number("largest", largest, at_least=0)
    passed = squared_gradient(g, y, gamma)
    g = _array("g", g)
    return largest**2 * (g @ g), largest**2 * passed


def initialization_gain(w: Tensor, optimum: Tensor) -> tuple[float, float]:
    """Lemma 4.5: how much nearer an optimum is if scale does not matter.

    `optimum` is an optimum of the network without normalisation. With normalisation,
    each positive multiple of it is one too. If `<w, optimum> > 0`, the nearest has the
    squared distance

    ```
    |w - optimum|^2 - (|optimum|^2 - <optimum, w>)^2 / |optimum|^2
    ```

    Returns:
        The squared distances from `w` without and with normalisation.
    """
    w = _array("w", w)
    optimum = _array("optimum", optimum, m=w.size)
    if not w @ optimum > 0:
        raise ValueError(
            "Arguments `w` and `optimum` must have a positive inner product. "
            f"Received: a product of {w @ optimum}"
        )
    without = np.sum((w - optimum) ** 2)
    squared = optimum @ optimum
    return without, without - (squared - optimum @ w) ** 2 / squared


def output_sensitivity(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Theorem C.3 (first version): `sum_b (d output_b / dw)^2` for one weight `w`.

    `x` is the input that the weight multiplies, `y` the activations, one element per
    sample. With `alpha = <x, y_hat>`:

    ```
    without    sum(x^2)
    with       (m var(x) - alpha^2 / m) / sigma^2
    ```

    The paper assumes that `x` has mean zero, which makes the first `m var(x)`. Its
    statement has `alpha^2` in the second, its proof (Eq. 7) `alpha^2 / m`.

    Returns:
        The sums without and with normalisation.
    """
    y_hat, sigma = normalize(y)
    m = y_hat.size
    x = _array("x", x, m=m)
    alpha = x @ y_hat
    return np.sum(x**2), (m * np.var(x) - alpha**2 / m) / sigma**2
