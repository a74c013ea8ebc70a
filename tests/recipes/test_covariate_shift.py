import json

import numpy as np
import pytest

from recipes import covariate_shift, probed
from tests.recipes import dln_reference

RATE = probed.DLN["learning_rate"]


def test_deep_linear_network(tmp_path):
    settings = dln_reference.SETTINGS
    layers = ["layer1", "layer4"]
    directory = covariate_shift.covariate_shift(
        settings, ["none", "bn"], layers, tmp_path
    )
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["results.json", "shift.png", "table.md", "training.png"]
    rows = json.loads((directory / "results.json").read_text())["rows"]
    cells = [(row["layer"], row["norm"]) for row in rows]
    assert cells == [(layer, norm) for layer in layers for norm in ("none", "bn")]
    assert rows[1]["distance"] == 0 and rows[3]["distance"] > 0

    kind = "covariate_shift-layer1+layer4"
    config = {**settings, "norm": "none"}
    _, lines = probed.train(kind, config, None, runs_dir=tmp_path)
    kernels, x, y = dln_reference.start()
    for line in lines:
        now = dln_reference.descend(kernels, x, y, RATE, line["step"])
        then = dln_reference.descend(now, x, y, RATE)
        _, gradients = dln_reference.loss_and_gradients(now, x, y)
        _, others = dln_reference.loss_and_gradients(then[:3] + now[3:], x, y)
        g, after = gradients[3], others[3]
        norm = np.linalg.norm(g)
        distance = np.linalg.norm(g - after)
        cosine = (g * after).sum() / (norm * np.linalg.norm(after))
        assert line["layer4_distance"] == pytest.approx(distance, rel=1e-2)
        assert line["layer4_relative"] == pytest.approx(distance / norm, rel=1e-2)
        assert line["layer4_cosine"] == pytest.approx(cosine, abs=1e-4)
        assert line["layer1_distance"] == 0
        assert line["layer1_cosine"] == pytest.approx(1, abs=1e-5)
