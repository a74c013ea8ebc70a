"""What layers compute in float64: functions of their input and weights by name.

Each has `train(values)`, which updates its state, `forward(values)` and
`gradients(g, values)` of the last step, `inference(values)` and `state()`. In
`values`, "x" is the input; "mask", of its shape, may hide elements from statistics.
`tests.support.any_layer.reference_of` makes them.
"""

import copy
from typing import NamedTuple

import numpy as np

from keras_norms import CBN, LpNorm, NoisyBN
from tests.support.batch_reference import (
    BatchNormReference,
    CBNReference,
    LpNormReference,
)
from tests.support.diagnostics_reference import gradient
from tests.support.weight_reference import Linear, WeightReference

REFERENCES = {CBN: CBNReference, NoisyBN: BatchNormReference, LpNorm: LpNormReference}
# Layer state -> reference state; any other is the second statistic.
NAMES = {"moving_mean": "moving_mean", "average_weight": "weight"}
NAMES |= {"rho": "rho", "learning_rate": "rate"}


class OfChannels:
    """CBN, NoisyBN or LpNorm. Groups of samples are batches from the same averages."""

    def __init__(self, each):
        self.axis, self.names = each.axis, {}
        self.group_size = each.form.arguments.get("group_size")
        make = REFERENCES[type(each.norm)]
        self.reference = make(each.channels, **known_to(make, each.form.arguments))
        for name, value in each.state().items():
            self.names[name] = NAMES.get(name, "moving_statistic")
            setattr(self.reference, self.names[name], value.astype("float64"))

    def state(self):
        return {k: getattr(self.reference, name) for k, name in self.names.items()}

    def train(self, values):
        """The output of a step, which updates the statistics.

        They become the mean over groups of their updates by each group. A group that
        hides a channel, and so leaves its average unchanged, does not count.
        """
        parts = self._parts(values)
        self.groups = [copy.copy(self.reference) for _ in parts]
        y = [group.train(*part) for group, part in zip(self.groups, parts)]
        for name in self.names.values():
            found = np.array([getattr(group, name) for group in self.groups])
            moved = found != getattr(self.reference, name)
            new = np.mean(found, 0, where=moved | ~moved.any(0))
            setattr(self.reference, name, new)
        return self._joined(y)

    def forward(self, values):
        """The output as a function of `values` alone, with the constants of a step."""
        parts = zip(self.groups, self._parts(values))
        return self._joined([group.forward(*part) for group, part in parts])

    def gradients(self, g, values):
        """Of sum(g * forward), by name."""
        parts = zip(self.groups, self._cut(g), self._parts(values))
        found = [group.gradients(slope, *part) for group, slope, part in parts]
        dx, dgamma, dbeta = zip(*found)
        found = {"x": self._joined(dx), "gamma": sum(dgamma), "beta": sum(dbeta)}
        return {name: value for name, value in found.items() if name in values}

    def inference(self, values):
        parts = self._parts(values)
        return self._joined([self.reference.inference(*part[:3]) for part in parts])

    def _parts(self, values):
        """For each group: x, gamma, beta and the mask."""
        affine = values.get("gamma", 1.0), values.get("beta", 0.0)
        x = self._cut(values["x"])
        masks = self._cut(values["mask"]) if "mask" in values else [None] * len(x)
        return [(part, *affine, mask) for part, mask in zip(x, masks)]

    def _cut(self, x):
        """Groups with the channels in the last axis."""
        groups = len(x) // self.group_size if self.group_size else 1
        return np.split(np.moveaxis(x, self.axis, -1), groups)

    def _joined(self, groups):
        return np.moveaxis(np.concatenate(groups), -1, self.axis)


def by_complex_steps(self, g, values):
    """Gradients of a reference with an analytic `forward`, exact to the last digit."""

    def loss(name):
        return lambda value: np.sum(g * self.forward({**values, name: value}))

    return {name: gradient(loss(name), value) for name, value in values.items()}


class Fused(NamedTuple):
    """CBN, a linear layer, and its activation."""

    linear: Linear
    norm: OfChannels
    arguments: dict

    gradients = by_complex_steps

    def state(self):
        return self.norm.state()

    def train(self, values):
        return self._activated(self.norm.train(values), values)

    def forward(self, values):
        return self._activated(self.norm.forward(values), values)

    def inference(self, values):
        return self._activated(self.norm.inference(values), values)

    def _activated(self, x, values):
        y = self.linear.output(x, values)
        return np.tanh(y) if "activation" in self.arguments else y


class Wrapped(NamedTuple):
    """A layer that is called with normalised kernels. It has no state."""

    linear: Linear
    norm: WeightReference

    gradients = by_complex_steps

    def state(self):
        return {}

    def kernels(self, values):
        found = {}
        for name, axes in self.linear.fan_in.items():
            kernel = values[name]
            ones = np.ones([n for i, n in enumerate(kernel.shape) if i not in axes])
            gain = values.get(name.replace("kernel", "gain"), ones)
            found[name] = self.norm.forward(kernel, gain, axes)
        return found

    def forward(self, values):
        return self.linear.output(values["x"], {**values, **self.kernels(values)})

    train = inference = forward


def known_to(reference, arguments):
    """The arguments of a layer that its reference also has."""
    return {k: v for k, v in arguments.items() if k in reference.__dataclass_fields__}
