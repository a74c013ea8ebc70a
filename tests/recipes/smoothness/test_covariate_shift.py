import json

import numpy as np
import pytest

from recipes.smoothness import covariate_shift
from tests.support import smoothness_reference as reference
from tests.support.smoothness_reference import RATE


def test_deep_linear_network(tmp_path):
    layers = ["layer1", "layer4"]
    settings = covariate_shift.Settings(
        **reference.SETTINGS, layers=layers, runs_dir=str(tmp_path), workers=1
    )
    directory = covariate_shift.run(settings)
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["results.json", "shift.png", "table.md", "training.png"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    cells = [(row["layer"], row["norm"]) for row in rows]
    assert cells == [(layer, norm) for layer in layers for norm in ("none", "bn")]
    assert rows[1]["distance"]["mean"] == 0 < rows[3]["distance"]["mean"]

    found = covariate_shift.train(settings.one(norm="none", seed=0))
    assert found.results["name"].endswith("-layerslayer1+layer4-steps4")
    lines = found.metrics
    kernels, x, y = reference.start()
    for line in lines:
        now = reference.descend(kernels, x, y, RATE, line["step"])
        then = reference.descend(now, x, y, RATE)
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
