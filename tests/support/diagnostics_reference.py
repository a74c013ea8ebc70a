"""A two-layer network with batch normalization in float64 NumPy, and exact derivatives.

    h = tanh(x W1 + b1)    z = gamma (h - mean h) / sqrt(var h + epsilon) + beta
    L = mean((z W2 + b2 - y)^2) + l2 sum(W1^2)

Everything is analytic, so that derivatives come from complex steps, without
cancellation. Nothing here is shared with the package.
"""

import numpy as np

EPSILON = 1e-3
L2 = 1 / 128  # exact in float32 too


def hidden(weights, x):
    return np.tanh(x @ weights[0] + weights[1])


def loss_of_hidden(weights, h, y):
    _, _, gamma, beta, kernel, bias = weights
    centred = h - np.mean(h, 0)
    z = gamma * centred / np.sqrt(np.mean(centred**2, 0) + EPSILON) + beta
    return np.mean((z @ kernel + bias - y) ** 2) + L2 * np.sum(weights[0] ** 2)


def loss(weights, x, y):
    return loss_of_hidden(weights, hidden(weights, x), y)


def gradient(function, point):
    """The gradient of an analytic function of a vector, by complex steps."""
    step = 1e-30
    points = point + 1j * step * np.eye(len(point))
    return np.array([function(p).imag for p in points]) / step


def hessian_vector_product(function, point, vector, step=1e-5):
    """Central differences of the exact gradient."""
    ahead = gradient(function, point + step * vector)
    behind = gradient(function, point - step * vector)
    return (ahead - behind) / (2 * step)


def hessian(function, point):
    columns = [hessian_vector_product(function, point, e) for e in np.eye(len(point))]
    return np.stack(columns, 1)


def of_vector(function, arrays):
    """`function` of a list of arrays, as a function of one vector."""
    ends = np.cumsum([a.size for a in arrays])[:-1]

    def of_vector(vector):
        parts = np.split(vector, ends)
        return function([p.reshape(a.shape) for p, a in zip(parts, arrays)])

    return of_vector, np.concatenate([np.ravel(a) for a in arrays]).astype("float64")
