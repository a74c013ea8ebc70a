"""Layers with any weights, in any state, on any batch, and their references."""

import functools
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_norms import CBN, LpNorm, NoisyBN
from tests.support.autodiff import BACKEND, compiled, training_step
from tests.support.batch_reference import BatchNormReference, LpNormReference
from tests.support.cbn_reference import CBNReference

QUIET = {"mean_range": 0, "scale_range": 1, "mean_jitter": 0, "scale_jitter": 0}
# By name: the layer, its arguments, its reference, and those of it.
FORMS = {
    "CBN": (CBN, {}, CBNReference),
    "CBN(ratio)": (CBN, {"mean_gradient": "ratio", "rho": 2.0}, CBNReference),
    "CBN(coupled)": (CBN, {"decouple": False, "rho": 0.5}, CBNReference),
    "NoisyBN": (NoisyBN, {}, BatchNormReference),
    "LpNorm(1)": (LpNorm, {"p": 1}, LpNormReference),
    "LpNorm(2.5, centered)": (
        LpNorm,
        {"p": 2.5, "norm_of": "centered"},
        LpNormReference,
    ),
    "LpNorm(inf)": (LpNorm, {"p": np.inf}, LpNormReference),
}
SHAPES = {"dense": ((6, 4), -1), "sequence": ((3, 4, 5), 1)}
# Without compilation where it costs more than it saves.
FAST = "jit_compile" if BACKEND == "jax" else "eager"


class Case(NamedTuple):
    """A layer for one shape, compiled once for all examples."""

    layer: Any
    shape: tuple
    axis: int

    @property
    def channels(self):
        return self.shape[self.axis]

    def assign(self, values):
        for name, value in values.items():
            getattr(self.layer, name).assign(value)

    def state(self):
        """The statistics, without the state of a generator."""
        found = {v.name: numpy(v) for v in self.layer.non_trainable_variables}
        return {k: v for k, v in found.items() if v.shape in ((), (self.channels,))}


@functools.cache
def case(form, shape, epsilon=1e-3):
    cls, arguments, _ = FORMS[form]
    shape, axis = SHAPES[shape]
    quiet = QUIET if cls is NoisyBN else {}
    layer = cls(axis=axis, epsilon=epsilon, momentum=0.5, **arguments, **quiet)
    layer.build(shape)
    return Case(layer, shape, axis)


@functools.cache
def step_of(each, mode):
    """A training step: output, gradients of `loss_of`, and the state moves on."""
    positions = upstream(each)

    def loss(y):
        return ops.sum(ops.convert_to_tensor(positions) * y + y * y / 2)

    return training_step(each.layer, loss, mode)


def upstream(each):
    """The gradient of the loss where the output is 0, the same for all channels."""
    shape = last(each, np.empty(each.shape)).shape[:-1]
    g = np.random.default_rng(0).normal(size=(*shape, 1)).astype("float32")
    return np.moveaxis(g, -1, each.axis)


@functools.cache
def inference_of(each):
    def call(parameters, state, x):
        return each.layer.stateless_call(parameters, state, x, training=False)[0]

    return compiled(call, FAST)


def infer(each, x):
    layer = each.layer
    variables = layer.trainable_variables, layer.non_trainable_variables
    x = ops.convert_to_tensor(x)
    return numpy(inference_of(each)(*([v.value for v in vs] for vs in variables), x))


def numpy(x):
    return np.asarray(ops.convert_to_numpy(x))


def example(each, seed, rate=-1.0):
    """A batch, and values for every weight; the second statistic is of its size."""
    rng = np.random.default_rng(seed)
    location, scale = rng.uniform(-4, 4), np.exp(rng.uniform(-1, 2))
    x = last(each, rng.normal(size=each.shape)) + rng.normal(size=each.channels)
    x = np.moveaxis(x * scale + location, -1, each.axis).astype("float32")
    values = {
        "gamma": rng.uniform(0.5, 2, each.channels)
        * rng.choice([-1, 1], each.channels),
        "beta": rng.normal(size=each.channels) * scale,
        "moving_mean": location + rng.normal(size=each.channels) * scale,
    }
    for name in ("moving_square", "moving_variance"):
        values[name] = rng.uniform(0.5, 3, each.channels) * scale**2
    values["moving_norm"] = np.sqrt(values["moving_square"])
    values["average_weight"] = rng.uniform(0, 1)
    values["learning_rate"] = rate
    known = {v.name for v in each.layer.variables}
    # As the layer holds them.
    return x, {k: np.float32(v) for k, v in values.items() if k in known}


def last(each, x):
    return np.moveaxis(x, each.axis, -1)


def reference_of(form, each, values):
    """The float64 reference in the state of `values`."""
    cls, arguments, make = FORMS[form]
    known = make.__dataclass_fields__
    arguments = {k: v for k, v in arguments.items() if k in known}
    reference = make(
        each.channels, momentum=0.5, epsilon=each.layer.epsilon, **arguments
    )
    second = {"moving_square", "moving_variance", "moving_norm"} & set(values)
    mean, second = (values[k].astype("float64") for k in ("moving_mean", *second))
    if make is CBNReference:
        reference.mean, reference.square = mean, second
        reference.weight = float(values["average_weight"])
    else:
        reference.moving_mean, reference.moving_statistic = mean, second
    return reference


def assert_near(actual, expected, size=1.0, bound=3e-5):
    """The deviation is small next to the largest expected number, or to `size`."""
    limit = bound * max(np.abs(expected).max(), size)
    assert np.abs(np.asarray(actual, "float64") - expected).max() <= limit
