import numpy as np
import pytest

from recipes.smoothness import covariate_shift
from tests.support import smoothness_reference as reference

PICTURES = {"shift.png", "training.png"}


def test_deep_linear_network(tmp_path):
    layers = ["layer1", "layer4"]
    settings, directory, rows = reference.run(covariate_shift, tmp_path, layers=layers)
    assert {path.name for path in directory.glob("*.png")} == PICTURES
    cells = [(row["layer"], row["norm"]) for row in rows]
    assert cells == [(layer, norm) for layer in layers for norm in ("none", "bn")]
    assert rows[1]["distance"]["mean"] == 0 < rows[3]["distance"]["mean"]

    found = covariate_shift.train(settings.one(norm="none", seed=0))
    kernels, x, y = reference.start()
    for line in found.metrics:
        now = reference.descend(kernels, x, y, line["step"])
        then = reference.descend(now, x, y)
        _, gradients = reference.loss_and_gradients(now, x, y)
        _, others = reference.loss_and_gradients(then[:3] + now[3:], x, y)
        g, after = gradients[3], others[3]
        norm = np.linalg.norm(g)
        distance = np.linalg.norm(g - after)
        cosine = (g * after).sum() / (norm * np.linalg.norm(after))
        assert line["layer4_distance"] == pytest.approx(distance, rel=1e-2)
        assert line["layer4_relative"] == pytest.approx(distance / norm, rel=1e-2)
        assert line["layer4_cosine"] == pytest.approx(cosine, abs=1e-4)
        assert line["layer1_distance"] == 0
        assert line["layer1_cosine"] == pytest.approx(1, abs=1e-5)
