"""What can stand for a channel that goes, and which go: the cheapest.

A constant, or a multiple of another channel. Measured where the channel is read: a
layer with a kernel reads x_c; without it,

    x_c ~ alpha x_d + offset

alpha goes into the kernel rows of channel d, the offset times the kernel into the bias.
Zero padding does not have the offset: where the kernel reads padding, the bias is wrong
by it. Its mean square adds to the error, as often as the kernel reads padding.
"""

import collections
import math

import numpy as np

from keras_norms import _keras
from keras_norms.ops.linear_of_affine import taps_inside
from keras_norms.surgery._graph import linear
from keras_norms.surgery._graph.arrays import to_numpy

# How many substitutes are tried for a channel, if `ratio` allows all others.
_TARGETS = 8
# Mean square of what float32 makes equal channels differ by, relative to their own.
_ROUNDING = 1e-11
_ROWS = 1 << 16


class Group:
    """Channels that a layer reads, each at the same number of features.

    `roots` is a vector (n,), the numbers of the channels, `features` an array (n, p),
    where in the input each is, `can_merge` whether kernel rows can take one another.
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
        # 0 where `squares` is 0, even if `padding` is infinite.
        found = np.zeros_like(squares)
        return np.multiply(self.padding, squares, out=found, where=squares != 0)

    def fits(self, rows, others):
        """Fit multiples of channels d to channels c, by least squares.

        Returns errors, factors, and whether there is an offset: arrays (c, d).
        """
        pairs = np.ix_(rows, others)
        squares, means = np.diag(self._squares), np.diag(self._mean_squares)

        def fit(products, own, their):
            zeros = np.zeros_like(products)
            alpha = np.divide(products, their, out=zeros, where=their > 0)
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

    def recording(self):
        """A scope in which calls of the layer add their inputs."""
        original = self.unit.layer.call

        def call(inputs, *args, **kwargs):
            x = to_numpy(inputs)
            padding = _padding(self.unit, x.shape)
            x = np.moveaxis(x, self.axis, -1)
            for group in self.groups:
                group.padding = max(group.padding, padding)
                group.record(x.reshape(-1, x.shape[-1]))
            return original(inputs, *args, **kwargs)

        return _keras.replaced(self.unit.layer, call=call)


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
    share = 1.0
    for size, *geometry in zip(
        positions,
        *(np.ravel(config[k]) for k in ("kernel_size", "strides", "dilation_rate")),
    ):
        share *= np.mean(taps_inside(size, *geometry, config["padding"]))
    return 1 / share - 1


def select(sites, makers, is_fixed, gamma, similarity, ratio, round_to):
    """Map the root of each channel that goes to that of its substitute.

    `None` is a constant. `sites` are finished, `makers` has a vector for each layer:
    the roots of what it makes.
    """
    by_share = ratio is not None
    places = {}  # By root, where it is read: the group, the row in it, the weight.
    for site in sites:
        for group, weights in zip(site.groups, _weights(site, by_share)):
            for row, root in enumerate(group.roots):
                place = group, row, weights[row]
                places.setdefault(int(root), []).append(place)
    families = {}  # The places of channels that the same layers read.
    for where in places.values():
        family = tuple(id(group) for group, _, _ in where)
        families.setdefault(family, []).append(where)
    limits = is_fixed, gamma, similarity, by_share
    candidates = [_candidates(family, *limits) for family in families.values()]
    choice = _Choice(np.hstack(candidates), makers, round_to)
    return choice.of_share(ratio) if by_share else choice.made()


def _weights(site, by_share):
    """Factors of the errors of channels, by group: 1, or what reaches the output."""
    if not by_share:
        return [np.ones(len(group.roots)) for group in site.groups]
    squares = _input_squares(site.unit)
    weights = [np.sum(squares[group.features], axis=1) for group in site.groups]
    made = sum(np.sum(w * group.variances) for w, group in zip(weights, site.groups))
    return [weight / made if made > 0 else weight for weight in weights]


def _input_squares(unit):
    """How much of each input's mean square a kernel passes on, a vector."""
    kernel = unit.weight(linear.kernel_names(unit)[0])
    if unit.cls in linear.SEPARABLE:  # As the one kernel that both of them make.
        point = unit.weight("pointwise_kernel").reshape(*kernel.shape[-2:], -1)
        kernel = np.einsum("...im,imo->...io", kernel, point)
    kernel = np.moveaxis(kernel, linear.kernel_axes(unit)[0], 0)
    return np.sum(np.square(kernel), axis=tuple(range(1, kernel.ndim)))


def _candidates(places, is_fixed, gamma, similarity, by_share):
    """What can stand for each of some channels that the same layers read.

    Columns of error, variance, minus the number of the channel, the root of what goes,
    and that of what stands for it (-1: a constant).
    """
    roots = np.array([group.roots[row] for (group, row, _), *_ in places])
    n, fixed = len(roots), is_fixed(roots)
    constant, merged, variance = np.zeros(n), np.zeros((n, n)), np.zeros(n)
    may_be = ~fixed & (gamma is not None)
    may_merge = ~np.eye(n, dtype=bool) & ~fixed[:, None] & (similarity is not None)
    # Tolerances hold at each layer; costs of a share of all add up.
    join = np.add if by_share else np.maximum
    for of_group in zip(*places):
        group = of_group[0][0]
        rows, weights = (np.array(each) for each in list(zip(*of_group))[1:])
        variances, noise = group.variances[rows], group.noise[rows]
        variance = np.maximum(variance, variances)
        # At a border errors may be infinite, and weights 0.
        weights = np.maximum(weights, np.finfo("float64").tiny)
        if gamma is not None:
            errors = group.constant_errors(rows)
            constant = join(constant, errors * weights)
            may_be &= errors <= (np.inf if by_share else gamma**2 + noise)
        if similarity is not None:
            errors = group.fits(rows, rows)[0]
            merged = join(merged, errors * weights[:, None])
            allowed = (1 - similarity**2) * variances
            allowed = np.maximum(allowed, (gamma or 0) ** 2) + noise
            may_merge &= group.can_merge & (by_share | (errors <= allowed[:, None]))
    may_be &= np.isfinite(constant)
    if by_share:
        may_merge &= _cheapest(merged, may_merge)
    c = np.flatnonzero(may_be)
    first = np.stack([constant[c], variance[c], -c, roots[c], np.full(len(c), -1)])
    c, d = np.nonzero(may_merge)
    second = np.stack([merged[c, d], variance[c], -c, roots[c], roots[d]])
    return np.hstack([first, second])


def _cheapest(costs, allowed):
    """Of each row the few smallest of those that are allowed, as booleans."""
    costs = np.where(allowed, costs, np.inf)
    few = np.argsort(costs, axis=1, kind="stable")[:, :_TARGETS]
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, few, True, axis=1)
    return chosen & np.isfinite(costs)


class _Choice:
    """Takes the cheapest of `_candidates` first."""

    def __init__(self, candidates, makers, round_to):
        order = np.lexsort(candidates[2::-1])
        self._pairs = candidates[3:, order].T.astype(int).tolist()
        self._sizes = [len(np.unique(roots)) for roots in makers]
        self._total = sum(map(len, makers))
        self._round_to = round_to
        # By root: the layers that make it, and how many channels it stands for.
        self._made_by = collections.defaultdict(list)
        self._channels = collections.Counter()
        for maker, roots in enumerate(makers):
            for root, count in zip(*np.unique(roots, return_counts=True)):
                self._made_by[int(root)].append(maker)
                self._channels[int(root)] += int(count)

    def of_share(self, ratio):
        """What goes if that share of all channels goes, or less."""
        most = math.floor(ratio * self._total + 1e-9)
        best, low, high = self.made(most), most, self._total
        while self._round_to > 1 and high - low > 1:  # Rounding has put some back.
            middle = (low + high) // 2
            found = self.made(middle)
            if self._count(found) > most:
                high = middle
            else:
                low = middle
                best = max(best, found, key=self._count)
        return best

    def _count(self, removed):
        return sum(self._channels[root] for root in removed)

    def made(self, most=math.inf):
        """What goes, of `most` channels at most. What stands for a channel stays."""
        left, removed, needed, count = list(self._sizes), {}, set(), 0
        for root, target in self._pairs:
            if root in removed or root in needed or target in removed:
                continue
            # A layer keeps one channel.
            is_last = any(left[maker] == 1 for maker in self._made_by[root])
            if is_last or count + self._channels[root] > most:
                continue
            removed[root] = None if target < 0 else target
            needed.add(target)
            count += self._channels[root]
            for maker in self._made_by[root]:
                left[maker] -= 1
        return self._rounded(removed, left)

    def _rounded(self, removed, left):
        """Put the most expensive ones back until no layer has a fraction of a block."""
        changes = self._round_to > 1
        while changes:
            changes = False
            for root in reversed(list(removed)):
                makes = self._made_by[root]
                if any(
                    left[maker] < self._sizes[maker] and left[maker] % self._round_to
                    for maker in makes
                ):
                    del removed[root]
                    for maker in makes:
                        left[maker] += 1
                    changes = True
        return removed
