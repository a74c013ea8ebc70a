"""What only groups of samples have; the rest is in `test_every_layer`."""

import keras
import numpy as np
import pytest

from keras_norms import CBN, LpNorm, NoisyBN
from tests.support.backend import numpy, tensorflow_only

X = np.random.default_rng(0).normal(1, 2, (6, 3)).astype("float32")


def test_one_group_is_the_batch():
    alone, grouped = CBN(), CBN(group_size=6)
    for layer in (alone, grouped):
        layer.set_learning_rate(0.03)
    for scale in (1, 2):
        y, expected = (layer(scale * X, training=True) for layer in (grouped, alone))
        np.testing.assert_array_equal(numpy(y), numpy(expected))
    for found, expected in zip(grouped.get_weights(), alone.get_weights()):
        np.testing.assert_array_equal(found, expected)


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
