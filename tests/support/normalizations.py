"""Norms compared with references step by step; which tests run in which modes."""

import itertools

import numpy as np
from keras import ops
from keras.layers import BatchNormalization

from tests.support import layer_reference
from tests.support.autodiff import MODES
from tests.support.backend import BACKEND, numpy, some
from tests.support.batch_reference import BatchNormReference, relative_error

REFERENCES = layer_reference.REFERENCES | {BatchNormalization: BatchNormReference}
# The modes with different kernels: TensorFlow's graph has those of eager mode, and
# JAX's eager mode those of XLA, one by one.
KERNELS = MODES[-1:] if BACKEND == "jax" else MODES[::2]


def in_modes(values, few=(), modes=KERNELS):
    """Values and modes: a few or all values in one mode each, in turns."""
    chosen = [(value, modes[i % len(modes)]) for i, value in enumerate(few or values)]
    # Eagerly, JAX runs the same code, but compiles each operation separately.
    every = modes if BACKEND == "jax" else MODES
    return some(itertools.product(values, every), chosen)


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


def linear_loss(g):
    """sum(g * y), in the dtype of y."""
    return lambda y: ops.sum(ops.convert_to_tensor(g, y.dtype) * y)


def expected_step(reference, x, gamma, beta, g, rate=-1.0):
    """Output and gradients of sum(g * y), as of `training_step`."""
    reference.rate = rate
    y = reference.train(x, gamma, beta)
    return [y, *reference.gradients(g, x, gamma, beta)]


def assert_near(actual, expected, tolerance=1e-5):
    for value, wanted in zip(actual, expected, strict=True):
        assert relative_error(value, np.asarray(wanted)) < tolerance
