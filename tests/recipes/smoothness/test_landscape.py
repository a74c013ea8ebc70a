import keras
import numpy as np
import pytest

from keras_norms import diagnostics
from recipes.engine import training
from recipes.smoothness import _training, landscape
from tests.support import smoothness_reference as reference


def test_deep_linear_network(tmp_path):
    settings, directory, (row,) = reference.run(landscape, tmp_path, norms=["none"])
    assert len(list(directory.glob("*.png"))) == 3

    along = {"learning_rate": reference.RATE, "step_range": (0.01, 30), "points": 8}
    lines = landscape.train(settings.one(norm="none", seed=0)).metrics
    largest = max(line["loss_max"] for line in lines)
    assert row["largest_loss_max"]["mean"] == pytest.approx(largest)
    for line, step in zip(lines, (0, 2), strict=True):
        found = diagnostics.landscape(*reference.descended(step), **along)
        assert line["step"] == step
        losses = [line[key] for key in ("loss", "loss_min", "loss_max")]
        assert losses == pytest.approx([found.loss, *found.loss_range], rel=1e-4)
        # The step of a hundredth is rounded to few bits in float32.
        distances = line["gradient_distances"]
        np.testing.assert_allclose(distances[1:], found.distances[1:], rtol=1e-3)
        assert line["gradient_distance_max"] == max(distances)
        assert line["effective_beta"] == pytest.approx(found.effective_beta, rel=5e-2)


@pytest.mark.thorough
def test_classifier(tmp_path, small_network):
    """Of half the width, with another direction."""
    own = reference.IMAGES | {"norms": ["lp1"], "width": 0.5, "longest": 6.0}
    own |= {"initializer": "glorot_uniform", "direction": "random"}
    settings, _, (row,) = reference.run(landscape, tmp_path, own)
    assert row["diverged"] == row["not_finite"]["mean"] == 0
    assert row["effective_beta"]["mean"] > 0
    one = settings.one(norm="lp1", seed=0)
    lengths = [0.1 * s for s in np.linspace(0.5, 6, 8)]
    lines = landscape.train(one).metrics
    np.testing.assert_allclose(lines[1]["step_lengths"], lengths)
    problem = _training.problem(one)
    model = problem.network()
    conv = model.get_layer("conv")
    assert conv.filters == 2
    assert isinstance(conv.kernel_initializer, keras.initializers.GlorotUniform)
    # Digits of 8x8 are enlarged, and batches go on where the steps are.
    assert model.input_shape == (None, 32, 32, 1)
    np.testing.assert_array_equal(problem.batches(1)[1][0], problem.batches(0)[3][0])


def test_runs_are_compared_at_the_same_training_loss():
    """Of the steps without a norm, here the first has no counterpart."""

    def outcome(norm, losses, ranges):
        settings = landscape.Run(norm=norm)
        metrics = [
            {"train_loss": loss, "loss_min": 1.0, "loss_max": 1.0 + width}
            | {"gradient_norm": 2.0, "gradient_distance_max": 3 * width}
            | {"effective_beta": 7.0}
            for loss, width in zip(losses, ranges, strict=True)
        ]
        return training.Outcome(settings, {"diverged": False}, metrics)

    none = outcome("none", [2.0, 1.0, 0.5], [8.0, 4.0, 2.0])
    bn = outcome("bn", [1.1, 0.52, 0.45, None], [1.0, 1.0, 5.0, 9.0])
    outcomes = training.Outcomes({each.settings: each for each in (none, bn)})
    found = landscape.relative_to_none(bn, outcomes)
    assert found["points"] == 2
    assert found["loss_range"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert found["gradient_distance"] == pytest.approx(found["loss_range"])
    assert found["relative_distance"] == pytest.approx(found["loss_range"])
    assert found["effective_beta"] == 1
