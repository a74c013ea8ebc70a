"""A two-layer network with batch normalization in float64 NumPy, and exact derivatives.

    h = tanh(x W1 + b1)    z = gamma (h - mean h) / sqrt(var h + epsilon) + beta
    L = mean((z W2 + b2 - y)^2) + l2 sum(W1^2)

Everything is analytic: derivatives come from complex steps, without cancellation.
Nothing here is shared with the package.
"""

import numpy as np

EPSILON = 1e-3
L2 = 1 / 128  # exact in float32 too


def normalized(x, epsilon=0.0, beta=0.0):
    """BN without affine weights; with a beta, CBN with statistics of the batch."""
    y = x - np.mean(x, 0) + beta
    return y / np.sqrt(np.mean(y**2, 0) + epsilon)


def at_input(slope, x, **kind):
    """The slope of a loss in x, given its slope in the `normalized` values."""
    return gradient(lambda x: np.sum(slope * normalized(x, **kind)), x)


def hidden(weights, x):
    return np.tanh(x @ weights[0] + weights[1])


def loss_of_hidden(weights, h, y):
    _, _, gamma, beta, kernel, bias = weights
    z = gamma * normalized(h, EPSILON) + beta
    return np.mean((z @ kernel + bias - y) ** 2) + L2 * np.sum(weights[0] ** 2)


def of_weights(weights, x, y):
    """The loss as a function of the weights in one vector, and that vector."""
    ends = np.cumsum([w.size for w in weights])[:-1]

    def loss(vector):
        parts = np.split(vector, ends)
        new = [part.reshape(w.shape) for part, w in zip(parts, weights)]
        return loss_of_hidden(new, hidden(new, x), y)

    return loss, np.concatenate([np.ravel(w) for w in weights])


def of_activations(weights, x, y):
    """The loss as a function of `h` in one vector, and that vector."""
    h = hidden(weights, x)
    return lambda v: loss_of_hidden(weights, v.reshape(h.shape), y), h.ravel()


def gradient(function, point):
    """The gradient of an analytic function of an array, by complex steps."""
    steps = 1e-30j * np.eye(point.size).reshape(-1, *point.shape)
    slopes = [function(point + step).imag for step in steps]
    return np.reshape(slopes, point.shape) / 1e-30


def hessian_vector_product(function, point, vector, step=1e-5):
    """Central differences of the exact gradient."""
    ahead = gradient(function, point + step * vector)
    behind = gradient(function, point - step * vector)
    return (ahead - behind) / (2 * step)


def hessian(function, point):
    columns = [hessian_vector_product(function, point, e) for e in np.eye(len(point))]
    return np.stack(columns, 1)
