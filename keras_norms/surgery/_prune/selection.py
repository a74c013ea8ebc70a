"""Which channels go: the cheapest, as far as tolerances or a share of all allow."""

import math

import numpy as np

from keras_norms.surgery._prune import resize

# A channel that may become any other one is tried with so many of them.
_TARGETS = 8


class Selection:
    """Which channels go, and what stands for each of them.

    Of finished `sites`, and of vectors of the roots of what each layer makes. `removed`
    has the root of each channel that goes, and that of the channel that stands for it,
    or `None` for a constant.
    """

    def __init__(self, sites, makers, is_fixed, gamma, similarity, ratio, round_to):
        self._where, self._weights = {}, {}
        self._by_share = ratio is not None
        for site in sites:
            self._weigh(site)
            for group in site.groups:
                for row, root in enumerate(group.roots):
                    self._where.setdefault(int(root), []).append((group, row))
        families = {}
        for root, places in self._where.items():
            family = tuple(id(group) for group, _ in places)
            families.setdefault(family, []).append(root)
        candidates = [
            self._candidates(np.array(roots), is_fixed, gamma, similarity)
            for roots in families.values()
        ]
        choice = _Choice(np.hstack(candidates), makers, round_to)
        self.removed = choice.of_share(ratio) if self._by_share else choice.made()

    def _weigh(self, site):
        """What a mean square of 1 in each channel is to what the layer makes."""
        if not self._by_share:
            self._weights |= {id(g): np.ones(len(g.roots)) for g in site.groups}
            return
        squares = resize.input_squares(site.unit)
        weights = [np.sum(squares[group.features], axis=1) for group in site.groups]
        made = sum(
            np.sum(w * group.variances) for w, group in zip(weights, site.groups)
        )
        for group, weight in zip(site.groups, weights):
            self._weights[id(group)] = weight / made if made > 0 else weight

    def _candidates(self, roots, is_fixed, gamma, similarity):
        """What can stand for each of some channels that the same layers read.

        Columns of error, variance, minus the number of the channel, the root of what
        goes, and that of what stands for it (-1: a constant).
        """
        places = [self._where[root] for root in roots]
        n = len(roots)
        constant, merged, variance = np.zeros(n), np.zeros((n, n)), np.zeros(n)
        may_be = np.full(n, gamma is not None) & ~is_fixed(roots)
        may_merge = ~np.eye(n, dtype=bool) & (similarity is not None)
        may_merge &= ~is_fixed(roots)[:, None]
        for place in range(len(places[0])):
            group = places[0][place][0]
            rows = np.array([p[place][1] for p in places])
            variances, noise = group.variances[rows], group.noise[rows]
            variance = np.maximum(variance, variances)
            weights = self._weights[id(group)][rows]
            # At a border errors may be infinite, and weights 0.
            weights = np.maximum(weights, np.finfo("float64").tiny)
            if gamma is not None:
                errors = group.constant_errors(rows)
                constant = self._joined(constant, errors * weights)
                may_be &= errors <= (np.inf if self._by_share else gamma**2 + noise)
            if similarity is not None:
                errors = group.merge_errors(rows)
                merged = self._joined(merged, errors * weights[:, None])
                allowed = (1 - similarity**2) * variances
                allowed = np.maximum(allowed, (gamma or 0) ** 2) + noise
                fits = self._by_share | (errors <= allowed[:, None])
                may_merge &= group.can_merge & fits
        may_be &= np.isfinite(constant)
        if self._by_share:
            may_merge &= _cheapest(merged, may_merge)
        c = np.flatnonzero(may_be)
        first = np.stack([constant[c], variance[c], -c, roots[c], np.full(len(c), -1)])
        c, d = np.nonzero(may_merge)
        return np.hstack(
            [first, np.stack([merged[c, d], variance[c], -c, roots[c], roots[d]])]
        )

    def _joined(self, costs, others):
        """Tolerances hold at each layer; costs of a share of all add up."""
        return costs + others if self._by_share else np.maximum(costs, others)

    def substitutes(self, group):
        """The rows of a group that go, each with its `Substitute`."""
        rows = {int(root): row for row, root in enumerate(group.roots)}
        return {
            row: group.substitute(row, rows.get(self.removed[root]))
            for root, row in rows.items()
            if root in self.removed
        }


def _cheapest(costs, allowed):
    """Of each row the few smallest of those that are allowed, as booleans."""
    costs = np.where(allowed, costs, np.inf)
    few = np.argsort(costs, axis=1, kind="stable")[:, :_TARGETS]
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, few, True, axis=1)
    return chosen & np.isfinite(costs)


class _Choice:
    """Takes the cheapest of `Selection._candidates` first."""

    def __init__(self, candidates, makers, round_to):
        order = np.lexsort(candidates[2::-1])
        self._pairs = candidates[3:, order].T.astype(int).tolist()
        self._sizes = [len(np.unique(roots)) for roots in makers]
        self._total = sum(map(len, makers))
        self._round_to = round_to
        self._made_by, self._channels = {}, {}
        for maker, roots in enumerate(makers):
            for root, count in zip(*np.unique(roots, return_counts=True)):
                self._made_by.setdefault(int(root), []).append(maker)
                self._channels[int(root)] = self._channels.get(int(root), 0) + count

    def of_share(self, ratio):
        """What goes if that share of all channels goes, or less."""
        most = math.floor(ratio * self._total + 1e-9)
        best, low, high = self.made(most), most, self._total
        while self._round_to > 1 and high - low > 1:  # Rounding has put some back.
            middle = (low + high) // 2
            found = self.made(middle)
            if self._count(found) > most:
                high = middle
                continue
            low = middle
            best = max(best, found, key=self._count)
        return best

    def _count(self, removed):
        return sum(self._channels.get(root, 0) for root in removed)

    def made(self, most=math.inf):
        """What goes, of `most` channels at most. What stands for a channel stays."""
        left, removed, needed, count = list(self._sizes), {}, set(), 0
        for root, target in self._pairs:
            makes = self._made_by.get(root, [])
            if root in removed or root in needed or target in removed:
                continue
            if any(left[maker] == 1 for maker in makes):
                continue  # A layer keeps one channel.
            if count + self._channels.get(root, 0) > most:
                continue
            removed[root] = None if target < 0 else target
            if target >= 0:
                needed.add(target)
            for maker in makes:
                left[maker] -= 1
            count += self._channels.get(root, 0)
        return self._rounded(removed, left)

    def _rounded(self, removed, left):
        """Put the most expensive ones back until no layer has a fraction of a block."""
        changes = self._round_to > 1
        while changes:
            changes = False
            for root in reversed(list(removed)):
                makes = self._made_by.get(root, [])
                if any(
                    left[maker] < self._sizes[maker] and left[maker] % self._round_to
                    for maker in makes
                ):
                    del removed[root]
                    for maker in makes:
                        left[maker] += 1
                    changes = True
        return removed
