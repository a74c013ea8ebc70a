import types

import keras
import numpy as np
import pytest

from keras_norms import diagnostics, recalibrate
from recipes.engine import training
from recipes.engine.errors import UserError
from recipes.smoothness import covariate_shift, noisy_shift
from tests.support import small
from tests.support import smoothness_reference as reference
from tests.support.backend import numpy


def test_covariate_shift(tmp_path):
    layers = ["layer1", "layer4"]
    settings, directory, rows = reference.run(covariate_shift, tmp_path, layers=layers)
    assert len(list(directory.glob("*.png"))) == 2
    cells = [(row["layer"], row["norm"]) for row in rows]
    assert cells == [(layer, norm) for layer in layers for norm in ("none", "bn")]
    assert rows[1]["distance"]["mean"] == 0 < rows[3]["distance"]["mean"]

    found = covariate_shift.train(settings.one(norm="none", seed=0))
    for line in found.metrics:
        at = {"layers": layers, "learning_rate": reference.RATE}
        shift = diagnostics.covariate_shift(*reference.descended(line["step"]), **at)
        for i, name in enumerate(layers):
            expected = shift.distances[i], shift.distances[i] / shift.norms[i]
            keys = f"{name}_distance", f"{name}_relative"
            assert [line[key] for key in keys] == pytest.approx(expected, rel=1e-2)
            assert line[f"{name}_cosine"] == pytest.approx(shift.cosines[i], abs=1e-5)


def build(norm):
    keras.utils.set_random_seed(0)
    return small.convolutions(None, (6, 6, 1), 3, norm, "relu")


def test_a_kernel_norm_and_its_layer_are_one_place():
    model, rng = build("ws"), np.random.default_rng(0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = rng.normal(size=(8, 6, 6, 1)), np.arange(8) % 3
    settings = types.SimpleNamespace(layers=("conv",), learning_rate=0.1)
    found = covariate_shift.measure(model, [batch], settings)
    at = {"layers": [model.get_layer("conv")], "learning_rate": 0.1}
    shift = diagnostics.covariate_shift(model, *batch, **at)
    assert found["conv_distance"] == pytest.approx(shift.distances[0], rel=1e-5)


def test_a_norm_before_the_layer_is_not_after_it():
    model = build("cbn")
    (output,) = noisy_shift.places(model, ["conv"], normalised=False).values()
    assert output is model.get_layer("conv").output


@pytest.mark.parametrize("recipe", [covariate_shift, noisy_shift])
def test_layers_that_are_not_there(recipe, tmp_path):
    sizes = {"width": 1 / 64, "batch_size": 4, "train_size": 8, "steps": 2, "every": 1}
    settings = recipe.Run(**sizes, layers=("stage3",), runs_dir=str(tmp_path))
    with pytest.raises(UserError, match="`layers` must be .* No such layer: stage3."):
        recipe.train(settings)


def test_changes():
    rng = np.random.default_rng(0)
    before, after = rng.normal(1, 2, (200, 3)), rng.normal(2, 3, (200, 3))
    before[:, 2] = 4.0
    found = noisy_shift.changes(before, after)
    change = np.abs(after.mean(0) - before.mean(0))
    assert found["mean_change"] == pytest.approx(change.mean())
    # Of the channels that vary.
    relative = change[:2] / before[:, :2].std(0)
    assert found["relative_mean_change"] == pytest.approx(relative.mean())
    variance = before[:, :2].var(0)
    relative = np.abs(after[:, :2].var(0) - variance) / variance
    assert found["relative_variance_change"] == pytest.approx(relative.mean())
    assert sum(found["histogram"]) == 200
    np.testing.assert_allclose(found["edges"], [before[:, 0].min(), before[:, 0].max()])
    found = noisy_shift.changes(np.full((4, 1), np.inf), np.ones((4, 1)))
    assert found["histogram"] is None and np.isnan(found["relative_mean_change"])


def test_activations_are_those_of_training():
    model, layers = build("noisy_bn"), ["stem", "conv"]
    x = np.random.default_rng(1).normal(size=(16, 6, 6, 1)).astype("float32")
    weights = [training.numpy_copy(v) for v in model.trainable_variables]
    state = [training.numpy_copy(v) for v in model.non_trainable_variables]
    layers = noisy_shift.places(model, layers)
    arrays, moved = noisy_shift.activations(model, layers, weights, state, x)
    assert list(layers)[:2] == ["stem", "stem, before the norm"] and len(arrays) == 4
    found, conv = arrays[:2]
    expected = numpy(model.get_layer("stem")(x)).reshape(-1, 4)
    np.testing.assert_allclose(conv, expected, rtol=1e-4, atol=1e-5)
    # The model was left alone: in training mode it moves its state to the same place.
    model(x, training=True)
    for variable, value in zip(model.non_trainable_variables, moved, strict=True):
        np.testing.assert_allclose(numpy(variable), numpy(value), rtol=1e-5)
    # The noise of the next call is another one.
    (again, *_), _ = noisy_shift.activations(model, layers, weights, moved, x)
    assert np.abs(again.mean(0) - found.mean(0)).max() > 0.05


@pytest.mark.thorough
def test_noisy_shift(tmp_path):
    settings, _, rows = reference.run(noisy_shift, tmp_path, layers=["layer3"])
    change = {row["norm"]: row["layers"]["layer3"]["mean_change"] for row in rows}
    # BN's mean is beta, which moves slowly; noise of +-0.5 is drawn at each step.
    assert change["bn"]["mean"] < 0.02 < 0.1 < change["noisy_bn"]["mean"]

    for line in noisy_shift.train(settings.one(norm="none", seed=0)).metrics:
        states = []
        for step in (line["step"], line["step"] + 1):
            model, x, _ = reference.descended(step)
            layer = model.get_layer("layer3")
            states.append(numpy(keras.Model(model.input, layer.output)(x)).var(0))
        before, after = states
        expected = np.abs(after - before).mean()
        assert line["layer3_variance"] == pytest.approx(before.mean(), rel=1e-3)
        assert line["layer3_variance_change"] == pytest.approx(expected, rel=2e-2)


def test_recalibrated_is_inference_with_statistics_without_noise():
    noisy, plain = build("noisy_bn"), build("bn")
    rng = np.random.default_rng(0)
    shape = noisy_shift.RECALIBRATION_STEPS, 32, 6, 6, 1
    x = rng.normal(1, 1, shape).astype("float32")
    for bare, full in zip(plain.trainable_weights, noisy.trainable_weights):
        value = rng.normal(1, 0.5, full.shape)
        full.assign(value)
        bare.assign(value)
    recalibrate(plain, x.reshape(-1, 6, 6, 1), verbose=0)
    y = plain.predict(x[0], verbose=0).argmax(-1)
    assert len(set(y)) > 1

    before = noisy.get_weights()
    make, batches = lambda: build("noisy_bn"), [(batch, None) for batch in x]
    problem = training.Problem(make, lambda epoch: batches, 1, 1, (x[0], y))
    noise, none = (noisy_shift.Run(norm=norm) for norm in ("noisy_bn", "none"))
    found = noisy_shift.recalibrated(noisy, problem, noise, None)
    assert found == {"recalibrated_test_accuracy": 1.0}
    assert all(map(np.array_equal, before, noisy.get_weights()))
    assert noisy_shift.recalibrated(noisy, problem, none, None) == {}
