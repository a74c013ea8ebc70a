"""Which channels go: those of the smallest errors, as far as the tolerances allow."""

import numpy as np


class Selection:
    """Which channels go, and what stands for each of them.

    Args:
        sites: List of `Site`, finished.
        makers: List of vectors of the roots of what each layer makes.
        is_fixed: Whether a root has to stay, a function of an array.
        gamma, similarity: See `prune`.

    Attributes:
        removed: Dictionary from the root of a channel that goes to that of the channel
            that stands for it, or `None` for a constant.
    """

    def __init__(self, sites, makers, is_fixed, gamma, similarity):
        self.removed = {}
        self._where = {}
        for site in sites:
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
        self._choose(np.hstack(candidates), makers)

    def _candidates(self, roots, is_fixed, gamma, similarity):
        """What can stand for each of some channels that the same layers read.

        Returns:
            Array of columns: error, variance, minus the number of the channel, the root
            of what goes, and that of what stands for it (-1: a constant).
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
            if gamma is not None:
                errors = group.constant_errors(rows)
                constant = np.maximum(constant, errors)
                may_be &= errors <= gamma**2 + noise
            if similarity is not None:
                errors = group.merge_errors(rows)
                merged = np.maximum(merged, errors)
                allowed = (1 - similarity**2) * variances
                allowed = np.maximum(allowed, (gamma or 0) ** 2) + noise
                may_merge &= group.can_merge & (errors <= allowed[:, None])
        c = np.flatnonzero(may_be)
        first = np.stack([constant[c], variance[c], -c, roots[c], np.full(len(c), -1)])
        c, d = np.nonzero(may_merge)
        return np.hstack(
            [first, np.stack([merged[c, d], variance[c], -c, roots[c], roots[d]])]
        )

    def _choose(self, candidates, makers):
        """Take the smallest errors first. What stands for a channel stays."""
        left = [len(np.unique(roots)) for roots in makers]
        made_by = {}
        for maker, roots in enumerate(makers):
            for root in np.unique(roots):
                made_by.setdefault(int(root), []).append(maker)
        needed = set()
        order = np.lexsort(candidates[2::-1])
        for root, target in candidates[3:, order].T.astype(int).tolist():
            makes = made_by.get(root, [])
            if root in self.removed or root in needed or target in self.removed:
                continue
            if any(left[maker] == 1 for maker in makes):
                continue  # A layer keeps one channel.
            self.removed[root] = None if target < 0 else target
            if target >= 0:
                needed.add(target)
            for maker in makes:
                left[maker] -= 1

    def substitutes(self, group):
        """The rows of a group that go, each with its `Substitute`."""
        rows = {int(root): row for row, root in enumerate(group.roots)}
        return {
            row: group.substitute(row, rows.get(self.removed[root]))
            for root, row in rows.items()
            if root in self.removed
        }
