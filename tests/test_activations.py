"""ReLU of this package: values, derivatives, files, and what surgery does with it."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, activations, convert, diagnostics, fold
from tests.support import autodiff
from tests.support import surgery_models as m
from tests.support.backend import jax_only, numpy


@pytest.mark.parametrize("mode", autodiff.MODES)
def test_value_and_gradient(mode):
    model = m.model_of((5,), m.apply(layers.Activation, activations.relu))
    x = np.array([[-2.0, -0.0, 0.0, 1e-30, 3.0]], "float32")
    step = autodiff.training_step(model, lambda y: keras.ops.sum(y * y), mode)
    y, slope = step(x)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(slope, 2 * np.maximum(x, 0))


def test_second_derivatives():
    x, y = np.random.default_rng(0).normal(size=(2, 8, 5))
    products = []
    for activation in ("relu", activations.relu):
        keras.utils.set_random_seed(0)
        model = m.model_of((5,), m.dense(6, activation), m.dense(5))
        model.compile("sgd", "mse")
        objective = diagnostics.Objective(model, x, y)
        vector = np.linspace(-1, 1, objective.start.size)
        products.append(objective.hessian_vector_product(vector))
    np.testing.assert_allclose(*products, rtol=1e-5, atol=1e-6)


@jax_only
def test_the_gradient_reads_the_output():
    import jax

    def total(x):
        return activations.relu(x).sum()

    program = jax.make_jaxpr(jax.grad(total))(np.ones(3, "float32")).jaxpr
    (barrier,) = (e for e in program.eqns if e.primitive.name == "optimization_barrier")
    readers = [e for e in program.eqns if program.invars[0] in e.invars]
    assert len(readers) == 1 and barrier not in readers


@pytest.mark.parametrize("norm", ["cbn", CBN(rho=2)])
def test_convert_gives_it_and_fold_and_norms_of_keras_take_it(norm, tmp_path):
    def own(model):
        return [getattr(layer, "activation", None) for layer in model.layers].count(
            activations.relu
        )

    active = m.apply(layers.Activation, "relu")
    convs = [m.apply(layers.Conv2D, 4, 3, activation=a) for a in (None, "relu", None)]
    model = m.model_of((9, 9, 3), convs[0], m.bn, active, *convs[1:])
    x = m.batch_for(model)
    new = m.quiet(convert, model, norm, data=x)
    path = tmp_path / "model.keras"
    new.save(path)
    loaded = keras.models.load_model(path)
    assert [own(each) for each in (model, new, loaded)] == [0, 2, 2]
    np.testing.assert_array_equal(numpy(loaded(x)), numpy(new(x)))
    for back in (fold(loaded), m.quiet(convert, loaded, "batch_norm")):
        assert own(back) == 0 and "keras_norms" not in str(back.get_config())
        m.assert_same_outputs(back, model, x)


def test_convert_leaves_the_activation_of_what_others_read():
    def steps(x):
        first, second = (layers.Activation("relu", name=f"of_{i}") for i in "ab")
        conv = layers.Conv2D(3, 3, padding="same")(x)
        both = layers.Concatenate()([conv, x])
        sums = layers.Conv2D(6, 1)(first(both)) + both
        return layers.Conv2D(2, 1)(second(sums))

    model = m.model_of((5, 5, 3), steps)
    for fused, own in ((False, ["of_b"]), (True, ["of_a", "of_b"])):
        new = m.quiet(convert, model, "cbn", fused=fused)
        found = [e.name for e in new.layers if isinstance(e, layers.Activation)]
        assert found == ["of_a", "of_b"]
        assert own == [
            n for n in found if new.get_layer(n).activation is activations.relu
        ]
