"""CBN, NoisyBN and LpNorm beside their references: layers, inputs, training steps."""

import itertools

import numpy as np
from keras import ops
from keras.layers import BatchNormalization

from keras_norms import CBN, LpNorm
from tests.support import layer_reference
from tests.support.autodiff import MODES
from tests.support.backend import BACKEND, numpy, some
from tests.support.batch_reference import BatchNormReference
from tests.support.cbn_reference import CBNReference, relative_error

INF = np.inf
FORMS = {
    "shift": {"rho": 0.7},
    "ratio": {"rho": 0.7, "mean_gradient": "ratio"},
    "coupled": {"rho": 0.7, "decouple": False},
    "coupled_ratio": {"rho": 0.7, "decouple": False, "mean_gradient": "ratio"},
}
NORMS = [(p, of) for p in (1, 1.5, 2, 3, INF) for of in ("input", "centered")]
CASES = {form: (CBN, arguments) for form, arguments in FORMS.items()}
CASES |= {f"l{p} {of}": (LpNorm, {"p": p, "norm_of": of}) for p, of in NORMS}
REFERENCES = layer_reference.REFERENCES | {BatchNormalization: BatchNormReference}


# The modes that run kernels of their own: TensorFlow's graph has those of eager, JAX's
# eager those of XLA, one by one.
KERNELS = MODES[-1:] if BACKEND == "jax" else MODES[::2]


def in_modes(values, few=(), modes=KERNELS):
    """Values and modes: a few or all values in one mode each, in turns."""
    chosen = [(value, modes[i % len(modes)]) for i, value in enumerate(few or values)]
    return some(itertools.product(values, MODES), chosen)


# Each p and each `norm_of`, and CBN with both changes at once.
FEW = ("shift", "coupled_ratio", "l1 input", "l1.5 centered", "l2 input", "l3 centered")
FEW += (f"l{INF} input",)


def built(shape, rng, layer, **arguments):
    """A layer with random gamma and beta, its reference, and both in float64."""
    reference = REFERENCES[layer]
    reference = reference(shape[-1], **layer_reference.known_to(reference, arguments))
    layer = layer(**arguments)
    layer.build((None, *shape[1:]))
    layer.gamma.assign(rng.normal(1, 0.3, shape[-1]))
    layer.beta.assign(rng.normal(0, 0.3, shape[-1]))
    affine = (numpy(v).astype("float64") for v in (layer.gamma, layer.beta))
    return layer, reference, *affine


def case(name, shape, rng, **more):
    """The same for one of `CASES`."""
    layer, arguments = CASES[name]
    return built(shape, rng, layer, **arguments | more)


def set_rate(layer, rate):
    """Tell CBN the learning rate; returns it as float32 has it, -1 for others."""
    if not isinstance(layer, CBN):
        return -1.0
    layer.set_learning_rate(rate)
    return float(numpy(layer.learning_rate))


def batch(rng, shape):
    """A float32 batch; every channel has its own mean and scale."""
    mean, std = rng.normal(0, 1, shape[-1]), rng.uniform(0.5, 2, shape[-1])
    return (mean + std * rng.normal(size=shape)).astype("float32")


def linear_loss(g):
    """sum(g * y), in the dtype of y."""
    return lambda y: ops.sum(ops.convert_to_tensor(g, y.dtype) * y)


def expected_step(reference, x, gamma, beta, g, rate=-1.0, mask=None):
    """Output and gradients of sum(g * y), as of `training_step`."""
    if isinstance(reference, CBNReference):
        y, last = reference.train(x, gamma, beta, rate)
    else:
        y, last = reference.train(x, gamma, beta, mask), mask
    return [y, *reference.gradients(g, x, gamma, beta, last)]


def averages(layer):
    """The two moving statistics of a layer or of a reference."""
    names = ("mean", "moving_mean"), ("square", "moving_square"), ("moving_norm",)
    names = [*names, ("moving_variance",), ("moving_statistic",)]
    found = [getattr(layer, n) for group in names for n in group if hasattr(layer, n)]
    return [numpy(v) for v in found]


def assert_near(actual, expected, tolerance=1e-5):
    for value, wanted in zip(actual, expected, strict=True):
        assert relative_error(value, np.asarray(wanted)) < tolerance
