"""What the recipes of this folder have in common."""

import numpy as np
import pytest

from recipes import models
from recipes.engine import command
from recipes.smoothness import _training, landscape
from tests.support import tiny


def test_width_and_batches(monkeypatch):
    monkeypatch.setattr(models, "build", tiny.build)
    problem = _training.problem(_training.Descent(width=0.5))
    model = problem.network()
    assert [model.get_layer(name).filters for name in ("stem", "conv")] == [2, 2]
    # Digits of 8x8 are enlarged.
    assert model.input_shape == (None, 32, 32, 1)
    # Batches go on where the steps are.
    for x, y in zip(problem.batches(1)[1], problem.batches(0)[21], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--network=dln", "--dataset=digits"], "`dataset` must be None with network="),
        (["--depth=3"], "Argument `depth` must be None with network='vgg'"),
        (["--steps=10", "--every=3"], "`steps` must be a multiple of `every`"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        command.parse(landscape.Settings, arguments)
