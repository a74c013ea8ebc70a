"""What is timed at inference, and what of it `fold` left."""

import keras
import pytest
from keras import layers

from benchmarks import inference
from tests.support.backend import thorough_on

pytestmark = thorough_on("jax")


def network(*before):
    return keras.Sequential([keras.Input((4, 4, 3)), *before, layers.Conv2D(2, 3)])


def test_a_rescaling_of_the_network_is_no_shift():
    models = {
        "CBN": network(layers.Rescaling(2.0)),
        "CBN, folded": network(layers.Rescaling(2.0), layers.Rescaling(1.0, 0.5)),
    }
    found = [inference.shifts_that_stay(models, form) for form in models]
    assert found == [0, 1]


def test_a_network_whose_norms_do_not_fold(monkeypatch):
    def make(weights, input_shape, classes):
        x = inputs = keras.Input(input_shape)
        # Nothing linear stands beside the norm.
        x = layers.BatchNormalization()(layers.ReLU()(x))
        return keras.Model(inputs, layers.ReLU()(x))

    monkeypatch.setattr(keras.applications, "Unfoldable", make, raising=False)
    with pytest.raises(ValueError, match="Unfoldable has no form without.*: 1 of its"):
        inference.forms("Unfoldable", 8)
