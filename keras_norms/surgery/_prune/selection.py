"""Which channels go: the cheapest, as far as tolerances or a share of all allow."""

import collections
import math

import numpy as np

from keras_norms.surgery._graph import linear

# A channel that may become any other one is tried with so many of them.
_TARGETS = 8


def select(sites, makers, is_fixed, gamma, similarity, ratio, round_to):
    """The root of each channel that goes, and of what stands for it: `None` a constant.

    `sites` are finished, `makers` has a vector for each layer: the roots of what it
    makes.
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
    """What a mean square of 1 in each channel is to what the layer makes, by group."""
    if not by_share:
        return [np.ones(len(group.roots)) for group in site.groups]
    squares = _input_squares(site.unit)
    weights = [np.sum(squares[group.features], axis=1) for group in site.groups]
    made = sum(np.sum(w * group.variances) for w, group in zip(weights, site.groups))
    return [weight / made if made > 0 else weight for weight in weights]


def _input_squares(unit):
    """How much of each input's mean square a kernel passes on, a vector."""
    if unit.cls not in linear.SEPARABLE:
        kernel = np.moveaxis(unit.weight("kernel"), linear.kernel_axes(unit)[0], 0)
        return np.sum(np.square(kernel), axis=tuple(range(1, kernel.ndim)))
    depth = np.square(unit.weight("depthwise_kernel"))
    depth = np.sum(depth, axis=tuple(range(depth.ndim - 2)))
    point = np.square(unit.weight("pointwise_kernel"))
    return np.sum(depth * np.sum(point.reshape(*depth.shape, -1), -1), -1)


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
