"""Networks that are built and compiled once, and only read by tests."""

import keras
import pytest

from tests.support import diagnostics_networks as networks


@pytest.fixture(autouse=True)
def seeded():
    """Layers take their seeds when they are made."""
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session", params=networks.PRECISIONS)
def nonlinear(request):
    return networks.nonlinear(request.param)


@pytest.fixture(scope="session", params=networks.PRECISIONS)
def linear(request):
    return networks.linear(request.param)
