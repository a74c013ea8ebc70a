import pathlib

import pytest

from tests.support import small
from tests.support.backend import BACKEND

HERE = pathlib.Path(__file__).parent
# What the backend hardly matters for is left to `make test-all` on JAX.
LATER = ("blindness", "cbn", "models", "smoothness", "spheres")
LATER += ("test_commands.py", "test_compare.py", "engine/test_run.py")


def pytest_collection_modifyitems(items):
    later = [HERE / name for name in LATER if BACKEND == "jax"]
    for item in items:
        if any(item.path.is_relative_to(place) for place in later):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture
def small_network(monkeypatch):
    """Classifiers are small ones, in this process."""
    small.use(monkeypatch)
