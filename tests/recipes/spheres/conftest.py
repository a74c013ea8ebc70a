import pytest

from tests.support import small, tiny


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    small.use(monkeypatch, tiny.build)
