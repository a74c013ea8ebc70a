"""keras-hub's networks: converted, trained, saved, loaded and folded."""

import pytest

from benchmarks import hub


@pytest.mark.thorough
@pytest.mark.parametrize("name", hub.NETWORKS)
def test_networks_of_keras_hub(name):
    pytest.importorskip("keras_hub")
    row = hub.check(name)
    assert row["spread"] > 1e-3  # The outputs say something.
    assert row["BatchNormalization"] > 0
    assert row["left"] == 0 and row["warnings"] == []
    assert row["preserve"] <= hub.PRESERVE_LIMIT
    assert row["losses"][0] != row["losses"][1]
    assert row["load"] <= 1e-6
    assert row["fold"] <= hub.FOLD_LIMIT and row["CBN fold"] <= hub.FOLD_LIMIT
    assert row["unchanged"]
