"""What only groups of samples have; the rest is in `test_every_layer`."""

import keras
import numpy as np
import pytest

from keras_norms import CBN, LpNorm
from tests.support.backend import numpy, tensorflow_only

X = np.random.default_rng(0).normal(1, 2, (6, 3)).astype("float32")


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


@pytest.mark.parametrize("cls", [CBN, LpNorm])
def test_a_batch_is_a_whole_number_of_groups(cls):
    layer = cls(group_size=4)
    with pytest.raises(ValueError, match="`group_size`.*=4 with a batch size of 6"):
        layer(X, training=True)
    layer(X)  # Inference has no groups.
    y, of_the_batch = (numpy(e(X[:4], training=True)) for e in (layer, cls()))
    np.testing.assert_array_equal(y, of_the_batch)


@tensorflow_only
@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_of_unknown_size_is_checked_as_it_runs(compiled):
    import tensorflow as tf

    layer = CBN(group_size=3)
    layer.build((None, 3))
    run = tf.function(
        lambda x: layer(x, training=True),
        input_signature=[tf.TensorSpec((None, 3))],
        jit_compile=compiled,
    )
    np.testing.assert_allclose(run(X), layer(X, training=True), rtol=1e-5, atol=1e-6)
    said = "`group_size` must divide|group_size_must_divide"
    with pytest.raises(tf.errors.InvalidArgumentError, match=said):
        run(X[:4])


def test_what_no_group_can_be_of():
    with pytest.raises(ValueError, match="`group_size` must be None if the first"):
        CBN(axis=0, group_size=2).build((4, 3))
    with pytest.raises(ValueError, match="group_size=2 with synchronized=True"):
        CBN(synchronized=True, group_size=2)


def test_blocks_are_traced_with_batches_of_a_made_up_size():
    norm = CBN(group_size=4)
    norm.build((None, 3))
    block = keras.layers.Lambda(lambda x: norm(x, training=True))
    assert block(keras.Input((3,))).shape == (None, 3)
