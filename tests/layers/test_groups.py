"""What only groups of samples have; the rest is in `test_every_layer`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_norms import CBN, LpNorm, NoisyBN
from tests.support.any_layer import FORMS, GROUPS, Case, case, example, step_of
from tests.support.autodiff import FAST, training_step
from tests.support.backend import numpy, some, tensorflow_only

X = np.random.default_rng(0).normal(1, 2, (6, 3)).astype("float32")
ONE_EACH = ["CBN(groups)", "NoisyBN(groups)", "LpNorm(groups)"]


def made_like(each, group_size):
    """A layer with other groups, in the same state."""
    arguments = {**each.form.arguments, "group_size": group_size}
    form = each.form._replace(arguments=arguments)
    layer = form.make()
    layer.build(each.shape)
    for variable, other in zip(layer.variables, each.layer.variables, strict=True):
        variable.assign(other)
    return Case(form, layer, each.shape)


@pytest.mark.parametrize("name", ONE_EACH)
def test_one_group_is_the_batch(name):
    each = case(name)
    x, start = example(each, 0, 0.03)
    each.assign(start)
    alone, grouped = made_like(each, None), made_like(each, len(x))
    for found, expected in zip(step_of(grouped)(x), step_of(alone)(x), strict=True):
        np.testing.assert_array_equal(found, expected)
    for name, value in grouped.state().items():
        np.testing.assert_array_equal(value, alone.state()[name])


@pytest.mark.parametrize(
    "name", some([name for name in GROUPS if not FORMS[name].inner], ONE_EACH)
)
def test_a_mask_hides_elements_and_whole_groups(name):
    """Each group is a batch of its own; one that hides a channel does not count."""
    each = case(name)
    x, start = example(each, 1, 0.03)
    each.assign(start)
    size = each.form.arguments["group_size"]
    rng = np.random.default_rng(1)
    mask = rng.random(x.shape) < 0.8
    channel = np.moveaxis(mask, each.axis, 0)
    channel[0, :size] = False  # in the first group
    channel[1, :] = False  # in all of them
    channel[2, ::size] = True
    g = rng.normal(size=x.shape).astype("float32")

    def step(layer, g, *arrays):
        def loss(y):
            return ops.sum(ops.convert_to_tensor(g) * y)

        return training_step(layer, loss, FAST)(arrays[0], mask=arrays[1])

    parts = zip(*(np.split(array, len(x) // size) for array in (g, x, mask)))
    expected, states = [], []
    for part in parts:
        group = made_like(each, None)
        expected.append(step(group.layer, *part))
        states.append(group.state())
    before = each.state()
    found = step(each.layer, g, x, mask)
    y, dx, *gradients = zip(*expected)
    expected = [*map(np.concatenate, (y, dx)), *map(sum, gradients)]
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    for name, value in each.state().items():
        if value.shape:
            groups = np.stack([state[name] for state in states])
            assert not np.allclose(groups[1], before[name])
            wanted = groups.mean(0)
            wanted[0] = groups[1:, 0].mean()
            wanted[1] = before[name][1]
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(value, states[0][name])


def test_a_group_that_is_not_finite_does_not_count():
    x = X.copy()
    x[0, 0] = np.nan
    layer, alone = CBN(group_size=3), CBN()
    layer(x, training=True)
    alone(x[3:], training=True)
    for name in ("moving_mean", "moving_square"):
        found, expected = (numpy(getattr(each, name)) for each in (layer, alone))
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        assert np.all(np.isfinite(found))


def test_scale_and_shift_have_a_row_for_each_group():
    layer = CBN(group_size=2)
    y = numpy(layer(X, training=True))
    scale, shift = layer.scale_and_shift(X, training=True)
    assert scale.shape == shift.shape == (3, 3)
    by_sample = (np.repeat(numpy(v), 2, 0) for v in (scale, shift))
    np.testing.assert_allclose(next(by_sample) * X + next(by_sample), y, atol=1e-5)


# What is refused


@pytest.mark.parametrize("cls", [CBN, NoisyBN, LpNorm])
def test_a_batch_is_a_whole_number_of_groups(cls):
    layer = cls(group_size=4)
    with pytest.raises(ValueError, match="`group_size`.*=4 with a batch size of 6"):
        layer(X, training=True)
    layer(X)  # Inference has no groups.
    assert layer(X[:4], training=True).shape == (4, 3)


@tensorflow_only
def test_a_batch_of_unknown_size_is_checked_as_it_runs():
    import tensorflow as tf

    layer = CBN(group_size=4)
    layer.build((None, 3))
    signature = [tf.TensorSpec((None, 3))]
    x = np.concatenate([X, X[:2]])
    for compiled, said in (
        (False, "`group_size` must divide the batch size"),
        (True, "group_size_must_divide_the_batch_size"),
    ):
        run = tf.function(
            lambda x: layer(x, training=True),
            input_signature=signature,
            jit_compile=compiled,
        )
        expected = layer(x, training=True)
        np.testing.assert_allclose(run(x), expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            run(X)


def test_what_no_group_can_be_of():
    with pytest.raises(ValueError, match="`group_size` must be None where the first"):
        CBN(axis=0, group_size=2).build((4, 3))
    with pytest.raises(ValueError, match="group_size=2 with synchronized=True"):
        CBN(synchronized=True, group_size=2)


def test_blocks_are_traced_with_batches_of_a_made_up_size():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = CBN(group_size=4)

        def call(self, x):
            return self.norm(x, training=True)

    assert Block()(keras.Input((3,))).shape == (None, 3)
