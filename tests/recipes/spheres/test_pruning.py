import json
import re
import shutil
from functools import partial

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN
from recipes.spheres import pruning
from recipes.spheres.pruning import Settings
from tests.support import small
from tests.support.backend import numpy

IMAGES = np.random.default_rng(1).normal(size=(32, 6, 6, 1)).astype("float32")


def network(norm=layers.BatchNormalization):
    """Three convolutions, each with a norm, the last one's channels in a sum."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(5, 3, activation="relu", name="one")(x)
    x = layers.Conv2D(4, 1, name="two")(norm(name="one_norm")(x))
    x = y = layers.ReLU()(norm(name="two_norm")(x))
    x = layers.Conv2D(4, 1, name="three")(x)
    x = layers.Add()([y, norm(name="three_norm")(x)])
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalMaxPooling2D()(x)))
    for layer in model.layers:
        if hasattr(layer, "gamma"):
            gammas = [0.1, -0.2, 0.3, 0.4, 0.5][: layer.gamma.shape[0]]
            layer.gamma.assign(rng.permutation(gammas))
            layer.beta.assign(rng.uniform(0.1, 1, layer.beta.shape))
    return model


def test_smallest_gamma():
    """Against the kernel of the next layer without these channels, and without beta."""
    model = network()
    # Not those of sums; the gamma of CBN is in units of the deviation.
    for made, rho in ((model, 1), (network(partial(CBN, rho=2.0)), 2)):
        ((name, found),) = pruning.own_norms(made).items()
        assert name == "one_norm"
        gamma = numpy(made.get_layer(name).gamma)
        np.testing.assert_allclose(found, np.abs(gamma) / rho)
    before = model.get_weights()
    pruned = pruning.without_smallest(model, 0.5, IMAGES)
    assert all(map(np.array_equal, before, model.get_weights()))
    gone = np.argsort(np.abs(numpy(model.get_layer("one_norm").gamma)))[:2]
    assert sorted(gone) == list(pruned.removed["one"])
    kernel = numpy(model.get_layer("two").kernel).copy()
    kernel[:, :, gone] = 0
    model.get_layer("two").kernel.assign(kernel)
    expected, actual = (m.predict(IMAGES, verbose=0) for m in (model, pruned.model))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    # A layer keeps one channel.
    pruned = pruning.without_smallest(network(), 0.99, IMAGES)
    assert pruned.model.get_layer("one").filters == 1


def test_a_step_with_the_penalty():
    """g = gradient + wd w + l1 sign(gamma), and w - rate g."""
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    after = []
    for gamma_l1 in (0.0, 0.3):
        twin = pruning.copy(model)
        optimizer = pruning.SlimmingSGD(0.1, 0.0, 0.0, gamma_l1=gamma_l1)
        twin.compile(optimizer, loss, run_eagerly=True)
        twin.train_on_batch(IMAGES[:8], np.arange(8) % 2)
        after.append({v.path: numpy(v) for v in twin.trainable_variables})
    plain, penalised = after
    old = {v.path: numpy(v) for v in model.trainable_variables}
    for path, value in plain.items():
        step = 0.1 * 0.3 * np.sign(old[path]) if path.endswith("gamma") else 0
        np.testing.assert_allclose(penalised[path], value - step, atol=1e-6)
    config = optimizer.get_config()
    assert pruning.SlimmingSGD.from_config(config).gamma_l1 == 0.3


def test_premise():
    model = network()
    norm = model.get_layer("one_norm")
    rows = numpy(keras.Model(model.inputs[0], norm.output)(IMAGES)).reshape(-1, 5)
    alike = np.abs(np.corrcoef(rows.T)) - np.eye(5)
    places = np.stack([numpy(norm.gamma), numpy(norm.beta)], 1)
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    nearest = alike[np.arange(5), np.argsort(distances)[:, 1]]
    found = pruning.premise(model, IMAGES)
    assert found["nearest"] == pytest.approx(np.mean(nearest), rel=1e-3)
    assert found["all"] == pytest.approx(alike.sum() / 20, rel=1e-3)
    assert found["most"] == pytest.approx(np.mean(alike.max(1)), rel=1e-3)


@pytest.mark.thorough
def test_pruning(tmp_path, monkeypatch, small_network):
    own = {"measure_size": 32, "statistics_size": 48, "test_size": 50, "shares": (0.5,)}
    own |= {"levels": (0.4,), "until": 1, "gamma_l1": 1e-3}
    asked = Settings(**small.SETTINGS, **own, **small.places(tmp_path))
    directory = pruning.run(asked)
    outcome = json.loads((directory / "results.json").read_text())
    found = [(line["method"], line["level"]) for line in outcome["points"]]
    assert found == [("whole", 0), ("gamma", 0.5), ("mean", 0.4), ("merge", 0.4)]
    whole = outcome["points"][0]
    assert whole["error"] < 1e-6 and whole["accuracy"] == outcome["accuracy"]
    # Without what was written last, nothing is measured anew.
    monkeypatch.setattr(pruning, "point", None)
    (directory / "results.json").unlink()
    assert pruning.run(asked) == directory

    # It was trained for one epoch, at the rates of a training of all epochs.
    (path,) = tmp_path.glob("runs_dir/pruning_train-*/metrics.jsonl")
    assert len(path.read_text().splitlines()) == 1
    problem, whole = map(pruning.problem, (asked, Settings(**small.SETTINGS)))
    assert problem.schedule.boundaries == whole.schedule.boundaries
    # A network that cannot be read is named, and what is to be deleted: the training.
    (path,) = (tmp_path / "saved_models_dir").iterdir()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{path.name} cannot be loaded") as error:
        pruning.trained(asked.training())
    place = re.search(r"delete the directory (\S+) and", str(error.value))[1]
    shutil.rmtree(place)
    assert pruning.trained(asked.training()).count_params() > 0
