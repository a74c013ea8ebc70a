"""ProjectWeights: a step is one on the sphere, of the kernels that it may be of."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, WS, ProjectWeights, diagnostics, freeze
from keras_norms.surgery.project_weights import scale_invariant_kernels
from tests.support import surgery_models as m
from tests.support.backend import BACKEND, later_on_jax, numpy


def network(optimizer="sgd", **kwargs):
    first, last = m.dense(6, name="first", **kwargs), m.dense(3, name="last")
    model = m.model_of((4,), first, m.bn, m.relu, last)
    model.compile(optimizer, "mse")
    return model


def norm_of(layer):
    return np.linalg.norm(numpy(layer.kernel).astype("float64"))


def test_a_step_is_projected():
    """And a model that was compiled before."""
    optimizer = keras.optimizers.SGD(2.0)
    model, (x, y) = network(optimizer), (m.images(8, 4), np.ones((8, 3)))
    first, last = model.get_layer("first"), model.get_layer("last")
    model.fit(x, y, batch_size=8, verbose=0)  # It is compiled without.
    before, start = numpy(first.kernel).astype("float64"), norm_of(first)
    gradient = diagnostics.value_and_grad(model, x, y).gradient[0]
    callback = ProjectWeights()
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    expected = before - 2 * gradient
    assert np.linalg.norm(expected) > 1.0001 * start
    expected *= start / np.linalg.norm(expected)
    np.testing.assert_allclose(numpy(first.kernel), expected, rtol=1e-3, atol=1e-5)
    assert callback.norms == {first.kernel.path: pytest.approx(start)}
    # Many steps, of which a compiled one makes several
    several = 1 if BACKEND == "torch" else 2
    model.compile(optimizer, "mse", steps_per_execution=several)
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[callback])
    assert norm_of(first) == pytest.approx(start, rel=1e-5)
    # Afterwards nothing is left of it.
    assert first.kernel.constraint is None
    other = norm_of(last)
    model.fit(x, y, batch_size=8, verbose=0)
    assert norm_of(first) > 1.0001 * start and norm_of(last) != other
    # A step whose square overflows
    start, optimizer.learning_rate = norm_of(first), 1e25
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert norm_of(first) == pytest.approx(start, rel=1e-5)


def test_averaged_weights_are_projected():
    model = network(keras.optimizers.SGD(2.0, use_ema=True, ema_momentum=0.5))
    first = model.get_layer("first")
    start, (x, y) = norm_of(first), (m.images(8, 4), np.ones((8, 3)))
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[ProjectWeights()])
    assert norm_of(first) == pytest.approx(start, rel=1e-5)


class Stop(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        raise KeyboardInterrupt


def test_a_training_after_one_that_was_interrupted():
    model, (x, y) = network(), (m.images(8, 4), np.ones((8, 3)))
    kernel, callback = model.get_layer("first").kernel, ProjectWeights()
    for again in callback, ProjectWeights():
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, verbose=0, callbacks=[callback, Stop()])
        model.fit(x, y, verbose=0, callbacks=[again])
        assert kernel.constraint is None


@later_on_jax
def test_which_kernels():
    """Those whose scale has no effect, as `weight_geometry` measures."""

    def einsum(bias_axes):
        sizes = {"output_shape": (5, 6), "bias_axes": bias_axes}
        return m.apply(layers.EinsumDense, "abc,cd->abd", **sizes)

    layer_norm, no_bias = m.apply(layers.LayerNormalization), {"use_bias": False}
    rms_norm = m.apply(layers.RMSNormalization)
    of_positions = m.apply(layers.BatchNormalization, axis=1)
    for shape, count, *steps in (
        ((5, 4), 1, m.dense(6), m.bn),
        ((5, 4), 0, m.dense(6), of_positions),
        ((5, 4), 1, m.dense(6, **no_bias), of_positions),
        ((5, 4), 0, einsum("bd"), m.bn),
        ((5, 4), 1, einsum("d"), m.bn),
        ((4,), 1, m.dense(6), m.bn),
        ((4,), 1, m.dense(6), m.relu, m.dense(6, **no_bias), layer_norm),
        ((4,), 1, m.dense(6), m.relu, m.dense(6, **no_bias), rms_norm),
        ((4,), 0, m.dense(6), layer_norm),
        ((4,), 0, m.dense(6), m.apply(CBN)),
        ((4,), 1, lambda x: WS(layers.Dense(6))(x), m.bn),
    ):
        model = m.model_of(shape, *steps, m.relu, m.apply(layers.Flatten), m.dense(3))
        model.compile("sgd", "mse")
        found = {v.path for v in scale_invariant_kernels(model)}
        x, y = 3 * m.images(32, *shape), np.ones((32, 3))
        geometry = diagnostics.weight_geometry(model, x, y)
        kinds = zip(geometry.weights, geometry.invariance)
        kernels = {k for k, v in kinds if k.endswith("kernel") and v != "none"}
        assert len(found) == count and found == kernels
    model = m.model_of((4,), m.dense(6), m.bn, m.dense(3))
    (norm,) = m.of_class(model, layers.BatchNormalization)
    norm.trainable = False
    assert not scale_invariant_kernels(model)


def test_layers_that_are_given():
    x, y = m.images(8, 4), np.ones((8, 3))
    model = network()
    start = norm_of(model.get_layer("last"))
    model.fit(x, y, verbose=0, callbacks=[ProjectWeights(["last"])])
    assert norm_of(model.get_layer("last")) == pytest.approx(start, rel=1e-5)
    constrained = network(kernel_constraint="non_neg")
    for model, given, message in (
        (constrained, None, "without a constraint.*first/kernel"),
        (freeze(network()), None, "must be given"),
        (network(), ["no_such"], "must hold layers of model"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(x, y, verbose=0, callbacks=[ProjectWeights(given)])


def test_kernels_of_one_path_keep_each_its_norm():
    steps = m.dense(name="fc"), m.bn
    parts = [m.model_of((4,), *steps, name=name) for name in ("one", "two")]
    model = m.model_of((4,), *parts)
    first, second = (part.get_layer("fc") for part in parts)
    second.kernel.assign(10 * second.kernel)
    before = norm_of(first), norm_of(second)
    model.compile("sgd", "mse")
    x = m.images(8, 4)
    model.fit(x, x, verbose=0, callbacks=[ProjectWeights([first, second])])
    assert (norm_of(first), norm_of(second)) == pytest.approx(before, rel=1e-5)
