"""Every layer of the package, and what it computes in float64.

`FORMS` is the table that drives what all layers must do (`tests/layers`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_norms import CBN, CWN, WN, WS, FusedCBN, LpNorm, NoisyBN
from keras_norms.ops import noise
from tests.support.autodiff import FAST, compiled, training_step
from tests.support.backend import numpy
from tests.support.layer_reference import Fused, OfChannels, Wrapped, known_to
from tests.support.weight_reference import CASES, WeightReference

# Noise depends on the position: without it, elements can be compared.
QUIET = {"mean_range": 0, "scale_range": 1, "mean_jitter": 0, "scale_jitter": 0}


def noise_of(shape, seed=0, calls=1, axis=-1, **ranges):
    """Scale and shift of each element in the last of some calls of a generator."""
    generator, x = keras.random.SeedGenerator(seed), ops.zeros(shape)
    ranges = {"axis": axis, **QUIET, **ranges}
    for _ in range(calls):
        pair = noise.scale_and_shift(x, generator, "float32", **ranges)
    return [numpy(ops.broadcast_to(v, shape)).astype("float64") for v in pair]


class Form(NamedTuple):
    """A layer with some arguments, the shape of its input, and the layer inside."""

    cls: type
    arguments: dict
    shape: tuple
    inner: str | None = None
    inner_arguments: dict = {}

    def make(self, dtype="float32", **other):
        arguments = {**self.arguments, **other}
        if self.inner is None:
            return self.cls(dtype=dtype, **arguments)
        inner = CASES[self.inner].make(dtype=dtype, **self.inner_arguments)
        if self.cls is FusedCBN:
            return FusedCBN(inner, CBN(dtype=dtype, **arguments))
        return self.cls(inner, **arguments)


def _norm(cls, shape, inner=None, inner_arguments=None, **arguments):
    arguments = {"axis": -1, "momentum": 0.5, "epsilon": 1e-3, **arguments}
    arguments |= QUIET if cls is NoisyBN else {}
    return Form(cls, arguments, shape, inner, inner_arguments or {})


DENSE, SERIES, IMAGES, VOLUMES = (6, 4), (3, 4, 5), (3, 4, 2, 3), (2, 3, 2, 2, 3)
RATIO = {"mean_gradient": "ratio"}
CHANNELS = {
    "CBN": _norm(CBN, DENSE),
    "CBN(ratio)": _norm(CBN, SERIES, axis=1, rho=2.0, **RATIO),
    "CBN(coupled)": _norm(CBN, IMAGES, decouple=False, rho=0.5),
    "CBN(no beta)": _norm(CBN, SERIES, axis=0, center=False),
    "CBN(coupled, ratio)": _norm(CBN, DENSE, decouple=False, scale=False, **RATIO),
    "NoisyBN": _norm(NoisyBN, SERIES, axis=1),
    "NoisyBN(no gamma)": _norm(NoisyBN, VOLUMES, scale=False),
    "NoisyBN(no beta)": _norm(NoisyBN, DENSE, center=False),
    "LpNorm(1)": _norm(LpNorm, IMAGES, axis=-3, p=1),
    "LpNorm(1, centered)": _norm(LpNorm, SERIES, axis=1, norm_of="centered", p=1),
    "LpNorm(1.5)": _norm(LpNorm, DENSE, p=1.5),
    "LpNorm(2, no beta)": _norm(LpNorm, DENSE, center=False),
    "LpNorm(2, centered)": _norm(LpNorm, SERIES, norm_of="centered", scale=False),
    "LpNorm(2.5, centered)": _norm(LpNorm, SERIES, p=2.5, norm_of="centered"),
    "LpNorm(inf)": _norm(LpNorm, VOLUMES, axis=1, p=np.inf),
    "LpNorm(inf, centered)": _norm(LpNorm, DENSE, p=np.inf, norm_of="centered"),
}
FUSED = {
    f"FusedCBN({inner}{suffix})": _norm(
        FusedCBN, CASES[inner].input_shape, inner, inner_arguments, **arguments
    )
    for inner, suffix, inner_arguments, arguments in (
        ("dense", ", tanh", {"activation": "tanh"}, {}),
        ("dense_of_sequences", ", no bias", {"use_bias": False}, {"rho": 2.0}),
        ("conv1d", "", {}, RATIO),
        ("conv2d", "", {}, {"decouple": False}),
        ("conv2d_same", "", {}, {}),
        ("conv2d_dilated", "", {}, {"center": False, "scale": False}),
        ("conv2d_in_groups", "", {}, {}),
        ("conv3d", "", {}, {"rho": 0.5}),
        ("depthwise_conv1d", "", {}, {"decouple": False}),
        ("depthwise_conv2d", "", {}, {}),
    )
}
GROUPS = {
    "CBN(groups)": _norm(CBN, (6, 2, 4), group_size=2),
    "CBN(groups, ratio)": _norm(CBN, SERIES, axis=1, group_size=1, **RATIO),
    "CBN(groups, coupled)": _norm(CBN, DENSE, decouple=False, group_size=3),
    "NoisyBN(groups)": _norm(NoisyBN, (4, 3, 4), axis=1, group_size=2),
    "LpNorm(groups)": _norm(LpNorm, DENSE, p=1.5, group_size=3),
    "LpNorm(groups, inf)": _norm(
        LpNorm, (4, 3, 2, 3), axis=1, p=np.inf, norm_of="centered", group_size=2
    ),
    "FusedCBN(groups)": _norm(FusedCBN, (2, 5, 4, 4), "conv2d_same", group_size=1),
}
# Every kind of layer in one wrapper, and one kind in all.
WRAPPERS = {WS: {"gain": True}, CWN: {"gain": True, "scale": 1.5}, WN: {}}
WRAPPED = {
    f"{cls.__name__}({inner})": Form(
        cls, {"epsilon": 0.1, **WRAPPERS[cls]}, CASES[inner].input_shape, inner
    )
    for i, inner in enumerate(CASES)
    for cls in (WRAPPERS if inner == "dense" else [[*WRAPPERS][i % 3]])
}
FORMS = CHANNELS | FUSED | GROUPS | WRAPPED
# One form of each layer.
ONE_EACH = ["CBN", "NoisyBN", "LpNorm(2.5, centered)", "FusedCBN(conv2d_same)"]
ONE_EACH += ["CBN(groups)", "WS(dense)", "CWN(depthwise_conv1d)"]
ONE_EACH += ["WN(conv1d_transpose)"]


@dataclasses.dataclass(eq=False)
class Case:
    """A built layer of some form."""

    form: Form
    layer: Any
    shape: tuple

    def __post_init__(self):
        self.norm = None  # the layer with the statistics of activations
        if self.form.cls not in WRAPPERS:
            self.norm = getattr(self.layer, "norm", self.layer)
            self.axis = self.norm.axis
            self.channels = self.shape[self.axis]

    def assign(self, values):
        for variable in self.layer.weights:
            if variable.name in values:
                variable.assign(values[variable.name])

    def state(self):
        """The statistics, without the state of a generator."""
        found = {v.name: numpy(v) for v in self.layer.non_trainable_variables}
        return {k: v for k, v in found.items() if "seed" not in k}

    def values(self, x):
        """The values with gradients, by name, in float64."""
        weights = {v.name: numpy(v) for v in self.layer.trainable_variables}
        return {k: v.astype("float64") for k, v in ({"x": x} | weights).items()}


@functools.cache
def case(form, /, shape=None, **arguments):
    form = FORMS[form]
    # If a test assigns no kernels, they are drawn from this seed.
    keras.utils.set_random_seed(0)
    layer, shape = form.make(**arguments), shape or form.shape
    layer.build(shape)
    return Case(form._replace(arguments=form.arguments | arguments), layer, shape)


def example(each, seed, rate=-1.0):
    """A batch, and values for every weight, as the layer holds them.

    Statistics and weights with the unit of the input have its magnitude.
    """
    rng = np.random.default_rng(seed)
    x, values = rng.normal(size=each.shape), {}
    if each.norm is not None:
        means = rng.uniform(-1, 1) + rng.normal(size=each.channels)
        x = np.moveaxis(np.moveaxis(x, each.axis, -1) + means, -1, each.axis)
    for variable in each.layer.weights:
        name, shape = variable.name, variable.shape
        if name == "gamma":
            value = rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)
        elif name in ("beta", "moving_mean"):
            value = rng.normal(size=shape)
        elif name.startswith("moving"):
            value = rng.uniform(0.5, 3, shape)
        elif name == "average_weight":
            value = rng.uniform(0, 1)
        elif name == "learning_rate":
            value = rate
        elif name == "rho":
            value = rng.uniform(0.5, 2)
        else:  # A kernel, a gain or a bias, small enough not to saturate tanh.
            value = rng.normal(0.5, 1, shape) * (1 if each.norm is None else 0.25)
        values[name] = np.float32(value)
    return x.astype("float32"), values


@functools.cache
def _call_of(each, training):
    def call(parameters, state, x):
        return each.layer.stateless_call(parameters, state, x, training=training)

    return compiled(call, FAST)


def call(each, x, training=False):
    """The output, and the state after it, which the layer does not keep."""
    variables = each.layer.trainable_variables, each.layer.non_trainable_variables
    values = ([v.value for v in vs] for vs in variables)
    y, state = _call_of(each, training)(*values, ops.convert_to_tensor(x))
    return numpy(y), [numpy(v) for v in state]


@functools.cache
def slope_of(each):
    """The gradient of the loss where the output is 0."""
    shape = each.layer.compute_output_shape(each.shape)
    return np.random.default_rng(9).normal(size=shape).astype("float32")


def loss_of(each):
    """A function of the output, whose gradient is `slope_of(each)` and the output."""
    dtype = "float64" if each.layer.compute_dtype == "float64" else "float32"

    def loss(y):
        y, slope = ops.cast(y, dtype), ops.convert_to_tensor(slope_of(each), dtype)
        return ops.sum(slope * y + y * y / 2)

    return loss


@functools.cache
def step_of(each, mode=FAST):
    """A training step: output, gradients of `loss_of`, and an updated state."""
    return training_step(each.layer, loss_of(each), mode)


def results(each, x, mode=FAST, **mask):
    """Output, gradients and state of a training step, by name."""
    names = [v.name for v in each.layer.trainable_variables]
    step = step_of(each, mode)(x, **mask)
    return dict(zip(["y", "x", *names], step, strict=True)) | each.state()


def expected_results(each, reference, values):
    """What `results` should be; this updates the reference."""
    y = reference.train(values)
    gradients = reference.gradients(slope_of(each) + y, values)
    return {"y": y} | gradients | reference.state()


def assert_near(found, expected, bound=1e-5, least=0):
    """For arrays by name: errors are small next to the largest number, or `least`."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == np.shape(value), name
        # A mean, of what `example` makes of size 1, may be small.
        size = np.abs(value).max(initial=max(least, name == "moving_mean"))
        assert np.all(np.abs(found[name] - value) < bound * size), name


def assert_step(each, reference, x, mode=FAST, *bounds, **mask):
    """A training step equals that of the reference, which is updated too."""
    expected = expected_results(each, reference, each.values(x) | mask)
    assert_near(results(each, x, mode, **mask), expected, *bounds)


def reference_of(each):
    """The float64 reference of a case in its current state."""
    form, linear = each.form, CASES.get(each.form.inner)
    if form.cls in WRAPPERS:
        known = known_to(WeightReference, form.arguments)
        return Wrapped(linear, WeightReference(form.cls.__name__.lower(), **known))
    norm = OfChannels(each)
    return Fused(linear, norm, form.inner_arguments) if linear else norm
