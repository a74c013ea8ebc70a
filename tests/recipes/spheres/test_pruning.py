import json

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN
from recipes import models
from recipes.engine import training
from recipes.spheres import _pruning_results, _slimming, pruning
from recipes.spheres.pruning import Settings
from tests.support import tiny

CONFIG = {
    "train_size": 64,
    "batch_size": 32,
    "epochs": 2,
    "measure_size": 32,
    "statistics_size": 48,
    "test_size": 50,
    "levels": (0.4,),
    "shares": (0.5,),
}


def network(norm=layers.BatchNormalization, seed=0):
    """Three convolutions, each with a norm, the last one's channels in a sum."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    x = inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(5, 3, activation="relu", name="one")(x)
    x = layers.Conv2D(4, 1, name="two")(norm(name="one_norm")(x))
    x = y = layers.ReLU()(norm(name="two_norm")(x))
    x = layers.Conv2D(4, 1, name="three")(x)
    x = layers.Add()([y, norm(name="three_norm")(x)])
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(x)))
    for layer in model.layers:
        if hasattr(layer, "gamma"):
            layer.gamma.assign(
                rng.permutation([0.1, -0.2, 0.3, 0.4, 0.5][: layer.gamma.shape[0]])
            )
            layer.beta.assign(rng.uniform(0.1, 1, layer.beta.shape))
    return _slimming.compiled(model)


def numpy(x):
    return keras.ops.convert_to_numpy(x)


def images(n=32):
    return np.random.default_rng(1).normal(size=(n, 6, 6, 1)).astype("float32")


def test_channels_of_sums_are_not_removed_by_gamma():
    model = network()
    assert list(_slimming.own_norms(model)) == ["one_norm"]
    np.testing.assert_allclose(
        _slimming.own_norms(model)["one_norm"], np.abs(numpy(model.layers[2].gamma))
    )


def test_gamma_of_cbn_is_in_units_of_the_deviation():
    model = network(lambda name: CBN(rho=2.0, name=name))
    gamma = np.abs(numpy(model.get_layer("one_norm").gamma))
    np.testing.assert_allclose(_slimming.own_norms(model)["one_norm"], gamma / 2)


def test_smallest_gamma():
    """Against the kernel of the next layer without these channels, and without beta."""
    model, x = network(), images()
    before = model.get_weights()
    pruned = _slimming.without_smallest(model, 0.5, x)
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)
    gone = np.argsort(np.abs(numpy(model.get_layer("one_norm").gamma)))[:2]
    assert sorted(gone) == list(pruned.removed["one"])
    kernel = numpy(model.get_layer("two").kernel).copy()
    kernel[:, :, gone] = 0
    model.get_layer("two").kernel.assign(kernel)
    expected, actual = (numpy(m(x, training=False)) for m in (model, pruned.model))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_keeps_one_channel():
    pruned = _slimming.without_smallest(network(), 0.99, images())
    assert pruned.model.get_layer("one").filters == 1


def test_a_step_with_the_penalty():
    """g = gradient + wd w + l1 sign(gamma), and w - rate g."""
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    after = []
    for gamma_l1 in (0.0, 0.3):
        twin = _slimming.copy(model)
        optimizer = _slimming.SlimmingSGD(0.1, 0.0, 0.0, gamma_l1=gamma_l1)
        twin.compile(optimizer, loss)
        twin.train_on_batch(images(8), np.arange(8) % 2)
        after.append({v.path: numpy(v) for v in twin.trainable_variables})
    plain, penalised = after
    old = {v.path: numpy(v) for v in model.trainable_variables}
    for path, value in plain.items():
        step = 0.1 * 0.3 * np.sign(old[path]) if path.endswith("gamma") else 0
        np.testing.assert_allclose(penalised[path], value - step, atol=1e-6)
    config = optimizer.get_config()
    assert _slimming.SlimmingSGD.from_config(config).gamma_l1 == 0.3


def test_premise():
    """Two units of one gamma and beta: with the same kernel they are one."""
    model = network()
    norm, conv = model.get_layer("one_norm"), model.get_layer("one")
    kernel, gamma = numpy(conv.kernel).copy(), numpy(norm.gamma).copy()
    beta = numpy(norm.beta).copy()
    kernel[..., :] = kernel[..., :1] * np.array([1, 2, 3, 4, 5])
    gamma[:] = 1
    conv.kernel.assign(kernel)
    norm.gamma.assign(gamma)
    norm.beta.assign(beta)
    found = pruning.premise(model, images())
    for value in found.values():
        assert value == pytest.approx(1, abs=1e-4)
    # Against NumPy, with kernels of their own.
    model = network(seed=3)
    norm = model.get_layer("one_norm")
    rows = numpy(keras.Model(model.inputs[0], norm.output)(images())).reshape(-1, 5)
    alike = np.abs(np.corrcoef(rows.T))
    nearest = []
    places = np.stack([numpy(norm.gamma), numpy(norm.beta)], 1)
    for i in range(5):
        distances = [np.hypot(*(places[i] - places[j])) for j in range(5)]
        nearest.append(alike[i, np.argsort(distances)[1]])
    found = pruning.premise(model, images())
    assert found["nearest"] == pytest.approx(np.mean(nearest), rel=1e-3)
    assert found["all"] == pytest.approx((alike.sum() - 5) / 20, rel=1e-3)
    most = np.max(alike - np.eye(5) * 2, 1)
    assert found["most"] == pytest.approx(np.mean(most), rel=1e-3)


def test_share_at():
    lines = [
        {"channels": c, "macs": 2 * c, "accuracy": a}
        for c, a in ((0.2, 0.85), (0.0, 0.9), (0.1, 0.89), (0.3, 0.88))
    ]
    for gone, expected in (("channels", 0.125), ("macs", 0.25)):
        found = _pruning_results.share_at(lines, 0.88, "accuracy", gone)
        assert found == pytest.approx(expected)
    assert _pruning_results.share_at(lines, 0.5, "accuracy", "macs") == 0.6
    assert _pruning_results.share_at(lines, 0.95, "accuracy", "macs") == 0


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Callable of changes, returns tiny settings."""
    monkeypatch.setattr(models, "build", tiny.build)
    training._last.clear()
    places = {"runs_dir": str(tmp_path), "saved_models_dir": str(tmp_path / "saved")}
    return lambda **changes: Settings(**CONFIG | places | changes)


def test_pruning(settings, monkeypatch):
    directory = pruning.run(settings())
    outcome = json.loads((directory / "results.json").read_text())
    found = [(line["method"], line["level"]) for line in outcome["points"]]
    assert found == [("whole", 0), ("gamma", 0.5), ("mean", 0.4), ("merge", 0.4)]
    whole = outcome["points"][0]
    assert whole["error"] < 1e-6 and whole["accuracy"] == outcome["accuracy"]
    for line in outcome["points"]:
        for key in ("accuracy", "recalibrated"):
            assert line[key] * 50 == pytest.approx(round(line[key] * 50), abs=1e-3)
    text = (directory / "table.md").read_text()
    assert f"{outcome['shares']['merge']['accuracy']['channels']:.1%}" in text
    assert (directory / "pruning.png").stat().st_size > 0
    # Again: complete. And without what was written last: nothing is measured anew.
    monkeypatch.setattr(pruning, "point", None)
    assert pruning.run(settings()) == directory
    (directory / "results.json").unlink()
    assert pruning.run(settings()) == directory
    again = json.loads((directory / "results.json").read_text())
    assert again["points"] == outcome["points"]


def test_training_until(settings, tmp_path):
    whole, part = settings(), settings(until=1, gamma_l1=1e-3)
    assert part.label().endswith("until1")
    problems = [pruning.problem(each) for each in (whole, part)]
    assert [each.epochs for each in problems] == [2, 1]
    # The rate is that of a training of all epochs.
    assert len({tuple(each.schedule.boundaries) for each in problems}) == 1
    pruning.trained(part.training())
    (path,) = tmp_path.glob("pruning_train-*/metrics.jsonl")
    assert len(path.read_text().splitlines()) == 1
    # Other points need no other network, and one that cannot be read is named.
    assert settings(until=1, gamma_l1=1e-3, shares=(0.3,)).training() == part.training()
    (path,) = (tmp_path / "saved").iterdir()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{path.name} is damaged.*cannot be loaded"):
        pruning.trained(part.training())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"measure_size": 0}, "`measure_size` must be at least 1"),
        ({"gamma_l1": -1.0}, "`gamma_l1` must be at least 0"),
        ({"levels": (0.1, 1.1)}, "`levels` must be at most 1"),
        ({"shares": ["a"]}, "`shares` must be values of type float"),
        ({"saved_models_dir": None}, "`saved_models_dir` must"),
        ({"dataset": "digit"}, "`dataset` must be one of digits"),
    ],
)
def test_bad_settings(settings, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        pruning.run(settings(**changes))
    assert not list(tmp_path.iterdir())
