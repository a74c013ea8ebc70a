"""Data that surgery takes, and one pass over it that measures what norms read."""

import contextlib
import warnings

import keras
import numpy as np
from keras import ops, tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._checks.models import check_inputs
from keras_norms.layers.cbn import CBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.ops.lp_norm import lp_statistics
from keras_norms.ops.moments import moments
from keras_norms.ops.shapes import per_channel, reduction_axes
from keras_norms.surgery._graph.affine import Statistics, moving_statistics
from keras_norms.surgery._graph.remake import is_of

# For up to so many batches, compiling well takes longer than it saves.
_FEW = 8
# A layer is of a class of its backend, as a tensor is.
_NO_DATA = str, bytes, type, set, keras.layers.Layer, keras.KerasTensor


def inputs_of(model, data):
    """The part of `data` that `predict` takes, or an error if it does not fit."""
    if isinstance(data, _NO_DATA) or data is None or np.isscalar(data):
        raise wrong_data(data)
    one_input = _keras.number_of_inputs(model) == 1
    if isinstance(data, tuple) and len(data) in (2, 3):
        with_targets = one_input or isinstance(data[0], (list, tuple, dict))
        return _checked(model, data[0] if with_targets else list(data))
    is_array = hasattr(data, "shape") and hasattr(data, "dtype")
    if is_array or isinstance(data, dict):
        return _checked(model, data)
    if isinstance(data, (list, tuple)):
        if not data:
            raise wrong_data(data)
        if not one_input and all(hasattr(x, "shape") for x in data):
            return _checked(model, list(data))
        for batch in data:
            _checked(model, _inputs(batch))
        return _as_tuples(data)
    known = "tensorflow", "torch", "grain", "pandas"
    is_known = any(is_of(cls, *known) for cls in type(data).__mro__)
    if is_known or isinstance(data, keras.utils.PyDataset):
        return data
    if hasattr(data, "__iter__"):
        return _as_tuples(data)
    raise wrong_data(data)


def _checked(model, data):
    check_inputs(model, data, "data")
    return data


def _inputs(batch):
    return batch[0] if isinstance(batch, tuple) and batch else batch


def _as_tuples(batches):
    """Batches of inputs alone, in tuples: Keras takes no other generators."""
    for batch in batches:
        inputs = _inputs(batch)
        yield (tuple(inputs) if isinstance(inputs, list) else inputs,)


def wrong_data(data):
    return ValueError(
        "Argument `data` must be an array, a tf.data.Dataset, a PyDataset, a "
        "DataLoader or an iterable of batches, and not be empty. "
        f"Received: data of class {type(data).__name__}"
    )


class NotFinite(ValueError):
    """Activations are not finite, and nothing is measured."""


def check_end(x, steps):
    """Raise ValueError if all batches are asked for and there is no last one."""
    if steps is not None:
        return
    if isinstance(x, keras.utils.PyDataset):
        is_endless = x.num_batches is None
    else:
        # Of a tf.data.Dataset: -1 if it has no end, -2 if it does not know.
        is_endless = hasattr(x, "cardinality") and int(x.cardinality()) == -1
    if is_endless:
        raise ValueError(
            "Argument `data` must have an end. Pass `steps` if there is such an "
            "argument, or a part of a tf.data.Dataset: `data.take(100)`. "
            f"Received: data of class {type(x).__name__}"
        )


def measure(
    model,
    layers,
    data,
    steps=None,
    batch_size=None,
    verbose="auto",
    with_batch_statistics=False,
):
    """The `Statistics` of the inputs of norms of a model, in one pass over data.

    With `with_batch_statistics` the norms normalise with those of each batch instead of
    their own; all else is at inference. `None` for a norm that the model does not call.
    """
    probe = _Probe(model, layers, with_batch_statistics)
    x = inputs_of(model, data)
    check_end(x, steps)
    if isinstance(data, list) and not isinstance(x, list):
        few = len(data) <= _FEW  # a list of batches
    else:
        few = _is_few(x, steps, batch_size)
    if few and keras.backend.backend() == "tensorflow":
        probe.compile(run_eagerly=True)  # Faster than to make a graph.
    try:
        with (
            warnings.catch_warnings(),
            quick_compilation() if few else contextlib.nullcontext(),
        ):
            # Keras says so of every generator that ends.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            outputs = probe.predict(x, batch_size, verbose, steps)
    except ValueError as e:
        if "data type" in str(e) or "generator" in str(e):
            raise wrong_data(data) from e
        raise
    found = [_combine(calls) if calls else None for calls in outputs]
    lost = [
        layer.name
        for layer, statistics in zip(layers, found)
        if statistics is not None and not np.isfinite(statistics[:3]).all()
    ]
    if lost:
        raise NotFinite(
            "Argument `data` must give activations that are finite, but the inputs of "
            f"layers {lost} are not. Look for NaN, infinity or very large numbers in "
            f"the data and weights. Received: data of class {type(data).__name__}"
        )
    return found


def _is_few(x, steps, batch_size):
    """Whether inputs as `predict` takes them are known to be a few batches."""
    if steps is not None:
        return steps <= _FEW
    first = (tree.flatten(x) or [()])[0]
    try:
        length = len(first)
    except TypeError:  # It has none, or a dataset does not know it.
        return False
    return length <= _FEW * ((batch_size or 32) if hasattr(first, "shape") else 1)


class _Probe(keras.Model):
    """A model whose outputs are statistics of what layers of another read.

    A list for each layer, with an array for each of its calls, a row for each batch.
    `predict` brings compilation, data of all kinds, devices, and a progress bar.
    """

    def __init__(self, model, norms, with_batch_statistics):
        super().__init__(name="probe")
        self.model, self.norms = model, norms
        self.with_batch_statistics = with_batch_statistics
        # JAX would call it once to build it, and compile each operation by itself.
        self.built = True

    def call(self, inputs):
        rows = [[] for _ in self.norms]
        with contextlib.ExitStack() as stack:
            for layer, own in zip(self.norms, rows):
                scope = _recording(layer, own, self.with_batch_statistics)
                stack.enter_context(scope)
            for layer in _keras.layers_of(self.model, keras.layers.RNN):
                if any(inside in self.norms for inside in _keras.layers_of(layer)):
                    # What a compiled loop computes stays inside it.
                    stack.enter_context(_keras.replaced(layer, unroll=True))
            self.model(inputs, training=False)
        return rows


def _recording(layer, rows, with_batch_statistics):
    """A scope in which calls of a layer add the statistics of their input to `rows`."""

    def recorded(method):
        def call(inputs, training=None, mask=None):
            count, *batch = _statistics(layer, inputs, mask)
            row = [ops.broadcast_to(v, ops.shape(batch[0])) for v in (count, *batch)]
            rows.append(ops.stack(row)[None])
            if not with_batch_statistics:
                return method(inputs, training=False)
            values = stored(layer, Statistics(*batch), ops.convert_to_tensor)
            state = [(v, values.get(v.name, v.value)) for v in layer.weights]
            with keras.StatelessScope(state):
                return method(inputs, training=False)

        return call

    # `FusedCBN` calls `scale_and_shift`.
    names = ("call", "scale_and_shift") if isinstance(layer, CBN) else ("call",)
    own = {name: recorded(getattr(layer, name)) for name in names}
    if with_batch_statistics and isinstance(layer, NoisyBN):
        own["noise_at_inference"] = False
    return _keras.replaced(layer, **own)


def stored(layer, statistics, convert):
    """The moving statistics that a norm has of the `Statistics` of its input, by name.

    `convert` turns a variable into an array of the same kind as the statistics.
    """
    decouples = isinstance(layer, CBN) and layer.decouple and layer.center
    shift = convert(layer.beta) if decouples else 0.0
    return moving_statistics(type(layer), statistics, shift, layer.epsilon)


def _statistics(layer, x, mask):
    """Count, mean, variance and, for LpNorm, the norm of one batch."""
    dtype = "float64" if layer.compute_dtype == "float64" else "float32"
    axis, ndim = layer.axis, len(x.shape)
    mask = arguments.broadcast_mask(mask, x, axis)
    if mask is None:
        # Two passes, without the kernels that training has: they would be compiled for
        # each shape, which takes longer than the pass over the data.
        axes, wide = reduction_axes(ndim, axis), ops.cast(x, dtype)
        mean = ops.mean(wide, axes)
        variance = ops.mean(ops.square(wide - per_channel(mean, ndim, axis)), axes)
        count = ops.cast(ops.size(x), dtype) / mean.shape[0]
    else:
        count, mean, variance = moments(x, dtype, axis, mask)
    norm = variance
    if isinstance(layer, LpNorm):
        centered = layer.norm_of == "centered"
        norm = lp_statistics(
            x, dtype, p=layer.p, centered=centered, axis=axis, mask=mask
        ).norm
    return count, mean, variance, norm


def _combine(calls):
    """`Statistics` of all batches, from arrays (batches, 4, channels), one a call."""
    batches = np.concatenate(calls).astype("float64")
    count, mean, variance, norm = np.moveaxis(batches, 1, 0)
    # A batch without any element, all of it masked, says nothing.
    share = count / np.maximum(np.sum(count, 0), 1)
    total = np.sum(share * mean, 0)
    spread = np.sum(share * (variance + np.square(mean - total)), 0)
    return Statistics(total, spread, np.sum(share * norm, 0), batches=len(calls[0]))


@contextlib.contextmanager
def quick_compilation():
    """Let JAX compile fast, not well, what runs a few times only."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)
