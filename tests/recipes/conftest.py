import pathlib

import pytest

from tests.support import small
from tests.support.backend import BACKEND

HERE = pathlib.Path(__file__).parent
# These hardly depend on the backend, and JAX compiles them for minutes. On JAX they are
# left to `make test-all`, and those that are thorough on every backend are skipped.
LATER = ("blindness", "cbn", "models", "smoothness", "spheres")
LATER += ("test_compare.py", "engine/test_run.py")
# These train nothing, and are skipped on JAX.
ELSEWHERE = ("models/test_models.py", "test_commands.py")


def pytest_collection_modifyitems(items):
    if BACKEND != "jax":
        return
    for item in items:
        rare = item.get_closest_marker("thorough") and is_in(item, LATER)
        if rare or is_in(item, ELSEWHERE):
            item.add_marker(pytest.mark.skip(reason="tested on other backends"))
        if is_in(item, (*LATER, *ELSEWHERE)):
            item.add_marker(pytest.mark.thorough)


def is_in(item, places):
    return any(item.path.is_relative_to(HERE / place) for place in places)


@pytest.fixture
def small_network(monkeypatch):
    """Classifiers are small ones, in this process."""
    small.use(monkeypatch)
