import pytest

from recipes import models
from recipes.engine import training
from tests.support import tiny


@pytest.fixture
def tiny_network(monkeypatch):
    """Classifiers are tiny ones, in this process."""
    monkeypatch.setattr(models, "build", tiny.build)
    monkeypatch.setattr(training, "_last", {})
