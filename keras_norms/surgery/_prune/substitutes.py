"""What can stand for a channel that goes: a constant, or a multiple of another one.

Measured where the channel is read. A layer with a kernel reads x_c; without it,

    x_c ~ alpha x_d + offset

alpha goes into the kernel rows of channel d, the offset times the kernel into the bias.
Zero padding does not have the offset, so that there the bias says too much, by the
offset: the mean square of that counts too, as often as the kernel reads padding.
"""

import numpy as np

from keras_norms.surgery._graph import linear

# Relative to the mean square of a channel: what float32 leaves of equal channels.
_ROUNDING = 1e-11
_ROWS = 1 << 16


class Group:
    """Channels that a layer reads, each at the same number of features.

    `roots` is a vector (n,), the numbers of the channels, `features` an array (n, p),
    where in the input each of them is. `can_merge` says whether kernel rows of one
    channel can take those of another.
    """

    def __init__(self, roots, features, can_merge):
        self.roots, self.features, self.can_merge = roots, features, can_merge
        n, p = features.shape
        self.padding, self._count = 0.0, 0
        self._sums = np.zeros((n, p))
        self._products = np.zeros((n, n))

    def record(self, x):
        """Add rows of inputs, an array (rows, features)."""
        n, p = self.features.shape
        for start in range(0, len(x), _ROWS):
            rows = x[start : start + _ROWS, self.features.ravel()].astype("float64")
            rows = rows.reshape(-1, n, p)
            self._sums += rows.sum(0)
            rows = np.moveaxis(rows, 1, -1).reshape(-1, n)
            self._products += rows.T @ rows
        self._count += len(x)

    def finish(self):
        """Take means. Before, nothing but `record` can be called."""
        p = self.features.shape[1]
        self.means = self._sums / self._count
        self._squares = self._products / (self._count * p)
        self._products = None
        self._mean_squares = self.means @ self.means.T / p
        self._covariances = self._squares - self._mean_squares
        self.noise = _ROUNDING * np.diag(self._squares)
        variances = np.maximum(np.diag(self._covariances), 0)
        self.variances = np.where(variances <= self.noise, 0, variances)

    def constant_errors(self, rows):
        """The mean square of what the mean leaves of channels, a vector."""
        squares = np.diag(self._mean_squares)[rows]
        return self.variances[rows] + self._of_padding(squares)

    def substitute(self, row, other):
        """Alpha and offset, one a feature, with which a row stands for another one."""
        _, alpha, with_offset = self.fits(np.array([row]), np.array([other]))
        alpha = float(alpha[0, 0])
        offset = self.means[row] - alpha * self.means[other]
        return alpha, offset * with_offset[0, 0]

    def _of_padding(self, squares):
        # Of an infinite padding too, where nothing is nothing.
        found = np.zeros_like(squares)
        return np.multiply(self.padding, squares, out=found, where=squares != 0)

    def fits(self, rows, others):
        """What multiples of channels d leave of channels c, arrays (c, d).

        Errors, factors, and whether there is an offset, of least squares.
        """
        pairs = np.ix_(rows, others)
        squares, means = np.diag(self._squares), np.diag(self._mean_squares)

        def fit(products, own, their):
            alpha = _divide(products, np.broadcast_to(their, products.shape))
            return alpha, np.maximum(own[:, None] - alpha * products, 0)

        covariances = self._covariances[pairs]
        alpha, errors = fit(covariances, self.variances[rows], self.variances[others])
        offsets = means[rows][:, None] + np.square(alpha) * means[others]
        offsets = offsets - 2 * alpha * self._mean_squares[pairs]
        noise = self.noise[rows][:, None]
        offsets = np.where(offsets <= noise, 0, offsets)
        errors = errors + self._of_padding(offsets)
        # Through the origin nothing is wrong at the border.
        plain_alpha, plain = fit(self._squares[pairs], squares[rows], squares[others])
        with_offset = (errors <= plain + noise) & (offsets > 0)
        errors = np.where(with_offset, errors, np.minimum(plain, errors))
        alpha = np.where(with_offset, alpha, plain_alpha)
        return errors, alpha, with_offset


class Site:
    """The input of one layer with a kernel in all calls, with its labels and roots."""

    def __init__(self, unit, labels, roots):
        self.unit, self.axis = unit, labels.axis
        self.groups = []
        can_merge = unit.cls not in linear.SEPARABLE
        by_root = {}
        for feature, root in enumerate(roots):
            by_root.setdefault(int(root), []).append(feature)
        for p in sorted(set(map(len, by_root.values()))):
            chosen = {root: each for root, each in by_root.items() if len(each) == p}
            features = np.array(list(chosen.values()))
            self.groups.append(Group(np.array(list(chosen)), features, can_merge))

    def record(self, x):
        """Add the input of one call, a NumPy array."""
        padding = _padding(self.unit, x.shape)
        x = np.moveaxis(x, self.axis, -1)
        for group in self.groups:
            group.padding = max(group.padding, padding)
            group.record(x.reshape(-1, x.shape[-1]))


def _padding(unit, shape):
    """How often a kernel reads padding, for each time that it reads a position.

    Infinite for a transposed convolution with a border: there a constant does not give
    the same everywhere whatever is done at the border.
    """
    if not linear.sees_border(unit):
        return 0.0
    if unit.cls in linear.TRANSPOSED:
        return np.inf
    config = unit.config
    positions = shape[2:] if config["data_format"] == "channels_first" else shape[1:-1]
    inside, everything = 1, 1
    for n, size, stride, dilation in zip(
        positions,
        *(np.ravel(config[k]) for k in ("kernel_size", "strides", "dilation_rate")),
    ):
        span = dilation * (size - 1)
        made = -(-n // stride)
        before = span
        if config["padding"] != "causal":
            before = max((made - 1) * stride + span + 1 - n, 0) // 2
        taps = np.arange(made)[:, None] * stride + np.arange(size) * dilation - before
        inside *= np.sum((taps >= 0) & (taps < n))
        everything *= taps.size
    return everything / inside - 1


def _divide(a, b):
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape), where=b > 0)
