"""Networks that are built and compiled once, and only read by tests."""

import keras
import pytest
from keras import layers

from tests.support import diagnostics_networks as networks
from tests.support import diagnostics_reference as reference
from tests.support.backend import precision


def case(*stack):
    """A network, a batch, and its weights in float64."""
    loss = keras.losses.MeanSquaredError()
    model = networks.sequential(*stack, loss=loss, run_eagerly=False)
    networks.randomize(model)
    return model, *networks.regression_batch(), networks.weights_of(model)


@pytest.fixture(scope="session", params=networks.PRECISIONS)
def nonlinear(request):
    """The network of `reference`."""
    with precision(request.param):
        l2 = keras.regularizers.L2(reference.L2)
        return case(
            layers.Dense(4, "tanh", kernel_regularizer=l2, name="hidden"),
            layers.BatchNormalization(epsilon=reference.EPSILON, name="norm"),
            layers.Dense(2, name="outputs"),
        )


@pytest.fixture(scope="session", params=networks.PRECISIONS)
def linear(request):
    """`L = mean((x W - y)^2)`: a quadratic function of the weights."""
    with precision(request.param):
        return case(layers.Dense(2, use_bias=False))
