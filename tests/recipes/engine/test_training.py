import json

import numpy as np
import pytest

from recipes import grid
from tests.recipes import tiny

CONFIG = {**tiny.SETTINGS, "activation": "tanh", "epochs": 3}


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(grid.models, "build", tiny.build)
    grid._last.clear()


def count(model, images, config):
    return {"images": len(images.x_train), "seed": config["seed"]}


def without_times(curve):
    return [{k: v for k, v in line.items() if k[:7] != "seconds"} for line in curve]


def test_a_training_measures_each_epoch(tmp_path):
    results, curve = grid.train(CONFIG, "some", count, runs_dir=tmp_path)
    (directory,) = tmp_path.iterdir()
    assert directory.name == results["name"]
    assert results["name"].startswith("some-digits-resnet8-cbn-tanh-seed0")
    assert [line["epoch"] for line in curve] == [1, 2, 3]
    assert all(line["images"] == 64 and line["seed"] == 0 for line in curve)
    assert results["test_accuracy"] == curve[-1]["test_accuracy"]
    assert results["epochs"] == 3 and not results["diverged"]
    files = sorted(path.name for path in directory.iterdir())
    assert files == ["config.json", "metrics.jsonl", "results.json"]

    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert grid.train(CONFIG, "some", count, runs_dir=tmp_path) == (results, curve)
    assert before == {path: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_stopped_and_resumed_equals_uninterrupted(tmp_path):
    def stop(model, images, config):
        if len(list(tmp_path.rglob("checkpoint.npz"))) == 1:
            raise KeyboardInterrupt
        return count(model, images, config)

    with pytest.raises(KeyboardInterrupt):
        grid.train(CONFIG, "some", stop, runs_dir=tmp_path)
    grid._last.clear()
    _, resumed = grid.train(CONFIG, "some", count, runs_dir=tmp_path)
    grid._last.clear()
    _, expected = grid.train(CONFIG, "other", count, runs_dir=tmp_path)
    assert len(expected) == 3
    assert without_times(resumed) == without_times(expected)


@pytest.mark.parametrize("norm", ["cbn", "bn", "cbn_batch"])
def test_a_network_that_is_used_again_equals_a_new_one(tmp_path, norm):
    """Seeds and rhos share a compiled network, of which training shows no sign."""
    configs = [
        {**CONFIG, "norm": norm, "seed": 0, "rho": 2.0},
        {**CONFIG, "norm": norm, "seed": 1},
    ]
    grid.train(configs[0], runs_dir=tmp_path / "shared")
    model = grid._last["model"]
    _, shared = grid.train(configs[1], runs_dir=tmp_path / "shared")
    assert grid._last["model"] is model
    grid._last.clear()
    _, alone = grid.train(configs[1], runs_dir=tmp_path / "alone")
    assert without_times(shared) == without_times(alone)


def test_amat_goes_with_the_norms_that_want_it(tmp_path):
    def rate(model, images, config):
        return {"rate": float(model.get_layer("conv_norm").learning_rate.numpy())}

    rates = {}
    for norm in ("bn_rho_amat", "bn_rho"):
        _, curve = grid.train({**CONFIG, "norm": norm}, "r", rate, runs_dir=tmp_path)
        rates[norm] = [line["rate"] for line in curve]
    assert rates["bn_rho"] == [-1, -1, -1]
    # Two steps an epoch; a tenth from the fourth step on, a hundredth from the sixth.
    np.testing.assert_allclose(rates["bn_rho_amat"], [0.1, 0.01, 0.001], rtol=1e-5)


def test_a_diverged_run_is_reported_and_the_grid_goes_on(tmp_path):
    lost = {**CONFIG, "norm": "none", "learning_rate": 1e30}
    outcomes = grid.train_all(
        [lost, CONFIG, CONFIG], workers=1, kind="g", measure=count, runs_dir=tmp_path
    )
    assert len(list(tmp_path.iterdir())) == 2  # equal configs are trained once
    (lost, curve), good, same = outcomes
    assert lost["diverged"] and curve[-1]["train_loss"] is None
    assert good == same and not good[0]["diverged"]
    assert grid.percent([lost]) == "diverged"
    accuracy = f"{100 * good[0]['test_accuracy']:.2f}"
    assert grid.percent([good[0], lost]) == f"{accuracy} ± 0.00 (1 of 2 diverged)"


def test_workers(tmp_path):
    configs = [{**CONFIG, "epochs": 1, "norm": norm} for norm in ("bn", "none")]
    arguments = {"measure": count, "runs_dir": tmp_path}
    expected = grid.train_all(configs, workers=1, **arguments)
    # They find what was trained: the network of their own processes is a larger one.
    assert grid.train_all(configs, workers=2, **arguments) == expected
    names = [results["name"] for results, _ in expected]
    assert "-bn-" in names[0] and "-none-" in names[1]
    with pytest.raises(ValueError, match="no.npz"):  # an error of a worker arrives
        bad = [{**CONFIG, "dataset": f"{seed}/no.npz", "seed": seed} for seed in (1, 2)]
        grid.train_all(bad, workers=2, **arguments)


def test_percent():
    runs = [{"diverged": False, "test_accuracy": a} for a in (0.5, 0.7)]
    assert grid.percent(runs) == "60.00 ± 10.00"


def test_files_of_an_outcome(tmp_path):
    settings = {"model": "resnet8", "epochs": 2}
    directory = grid.directory("x", tmp_path, settings, ["relu", "tanh"], ["seeds1"])
    assert directory.parent == tmp_path
    assert directory.name.startswith("x-digits-resnet8-relu+tanh-seeds1")
    assert directory.name.endswith("-epochs2")
    grid.write(directory, grid.markdown(["a", "b"], [[1, 2]]), {"loss": float("nan")})
    assert json.loads((directory / "results.json").read_text()) == {"loss": None}
    assert (directory / "table.md").read_text() == (
        "| a | b |\n| --- | --: |\n| 1 | 2 |\n"
    )


def test_bad_settings_are_refused_before_anything_is_trained(tmp_path):
    for bad in ({"norm": "cbm"}, {"activation": "sine"}, {"rho": 0.0, "norm": "cbn"}):
        with pytest.raises(ValueError, match=f"{[*bad][0]}="):
            grid.train_all([CONFIG, {**CONFIG, **bad}], workers=1, runs_dir=tmp_path)
    assert not list(tmp_path.iterdir())
