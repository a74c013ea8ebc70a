import pytest

from tests.support import small


@pytest.fixture
def small_network(monkeypatch):
    """Classifiers are small ones, in this process."""
    small.use(monkeypatch)
