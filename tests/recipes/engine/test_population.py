import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes.engine import data, optimizers, population, run, trial

EPOCHS = 4
IS_JAX = keras.backend.backend() == "jax"
needs_jax = pytest.mark.skipif(not IS_JAX, reason="populations train on JAX")

TRIALS = [
    {"seed": 3, "learning_rate": 0.1, "rho": 1.0, "omega": 3.0},
    {"seed": 1, "learning_rate": 0.05, "rho": 2.0, "omega": 5.0},
    {"seed": 3, "learning_rate": 0.02, "rho": 0.5, "omega": 0.0},
]
LOST = {"seed": 0, "learning_rate": 1e30, "rho": 1.0, "omega": 10.0}
# Trials take 16 steps here. Each rounds sums of up to 150 terms of order 1 in another
# order, by about 1e-6, and at these rates the training does not enlarge differences
# more than tenfold.
SAME = {"rtol": 1e-4, "atol": 1e-5}


def build(trial):
    """A small network, with dropout."""
    return keras.Sequential(
        [
            keras.layers.Input((6, 5, 2)),
            keras.layers.Conv2D(4, 3, activation="tanh"),
            CBN(rho=trial["rho"], omega=trial["omega"]),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(0.2),
            CBN(rho=trial["rho"], omega=trial["omega"]),
            keras.layers.Dense(3),
        ]
    )


def images():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 58).astype("int32")
    x = rng.normal(size=(58, 6, 5, 2)).astype("float32") + labels[:, None, None, None]
    return data.ImageData(x[:35], labels[:35], x[35:], labels[35:], 3)


def make(trials, build=build, **more):
    settings = {"epochs": EPOCHS, "batch_size": 8, "augment": True} | more
    return population.Population(build, trials, images(), **settings)


def weights(trials, index, **more):
    variables = trials.model(index, **more).variables
    return {v.path: keras.ops.convert_to_numpy(v) for v in variables}


def assert_same(a, b, **tolerance):
    assert len(a) == len(b)
    for x, y in zip(a.values(), b.values(), strict=True):
        np.testing.assert_allclose(x, y, **(tolerance or SAME))


@pytest.fixture(scope="module")
def together():
    trials = make(TRIALS)
    scores = [trials.train() | trials.evaluate() for _ in range(EPOCHS)]
    return trials, scores


@needs_jax
@pytest.mark.parametrize("k", [1, 2])
def test_a_trial_among_others_equals_the_trial_alone(together, k):
    trials, scores = together
    alone = make([TRIALS[k]])
    for together_scores in scores:
        assert_same(
            {
                key: value[0]
                for key, value in (alone.train() | alone.evaluate()).items()
            },
            {key: value[k] for key, value in together_scores.items()},
        )
    for best in (False, True):
        assert_same(weights(alone, 0, best=best), weights(trials, k, best=best))


def by_hand(settings, amat=True):
    """The same steps with the layers of Keras, one after the other.

    Returns:
        The model, and the mean loss of each epoch.
    """
    import jax

    x, y = images()[:2]
    keras.utils.set_random_seed(settings["seed"])
    model = build(settings)
    schedule = optimizers.piecewise_schedule(settings["learning_rate"], 4 * EPOCHS)
    optimizer = optimizers.SGD(schedule, 0.9, 5e-4)
    optimizer.build(model.trainable_variables)
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trainable, non_trainable, x, y):
        logits, non_trainable = model.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return criterion(y, logits), non_trainable

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    means = []
    for epoch in range(EPOCHS):
        order_key, key = trial.epoch_keys(settings["seed"], epoch)
        order = np.asarray(jax.random.permutation(order_key, 35))
        losses = []
        for step in range(4):
            for layer in model.layers:
                if isinstance(layer, CBN):
                    rate = float(schedule(4 * epoch + step)) if amat else -1.0
                    layer.set_learning_rate(rate)
            chosen = order[8 * step : 8 * step + 8]
            batch = trial.crop_and_flip(x[chosen], jax.random.fold_in(key, step))
            (value, state), gradients = gradient(
                [v.value for v in model.trainable_variables],
                [v.value for v in model.non_trainable_variables],
                batch,
                y[chosen],
            )
            losses.append(float(value))
            for variable, new in zip(model.non_trainable_variables, state, strict=True):
                variable.assign(new)
            optimizer.apply(gradients, model.trainable_variables)
        means.append(np.mean(losses))
    return model, means


@needs_jax
@pytest.mark.parametrize("amat", [True, False])
def test_one_trial_equals_the_steps_by_hand(amat):
    one = make(TRIALS[:1], amat=amat)
    losses = [one.train()["train_loss"][0] for _ in range(EPOCHS)]
    model, expected = by_hand(TRIALS[0], amat=amat)
    np.testing.assert_allclose(losses, expected, **SAME)
    values = {v.path: keras.ops.convert_to_numpy(v) for v in model.variables}
    assert_same(weights(one, 0), values)


@needs_jax
def test_scores_are_those_of_the_models(together):
    trials, scores = together
    _, _, x, y, _ = images()
    for k in range(len(TRIALS)):
        model = trials.model(k)
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        loss, accuracy = model.evaluate(x, y, verbose=0)
        np.testing.assert_allclose(scores[-1]["test_loss"][k], loss, **SAME)
        np.testing.assert_allclose(scores[-1]["test_accuracy"][k], accuracy, rtol=1e-6)
        best = trials.model(k, best=True)
        hits = best.predict(x, verbose=0).argmax(-1) == y
        highest = max(score["test_accuracy"][k] for score in scores)
        np.testing.assert_allclose(hits.mean(), highest, rtol=1e-6)
        norms = [layer for layer in model.layers if isinstance(layer, CBN)]
        assert all(layer.omega == TRIALS[k]["omega"] for layer in norms)
        rates = [float(layer.learning_rate.value) for layer in norms]
        np.testing.assert_allclose(rates, TRIALS[k]["learning_rate"] / 100, rtol=1e-6)
    assert scores[-1]["train_loss"].shape == (3,)


@needs_jax
def test_seeds_give_other_weights_and_other_batches():
    trials = make([TRIALS[0], TRIALS[0] | {"seed": 4}])
    kernels = [next(iter(weights(trials, k).values())) for k in range(2)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1

    import jax

    orders = [
        np.asarray(jax.random.permutation(trial.epoch_keys(seed, epoch)[0], 35))
        for seed, epoch in ((3, 0), (4, 0), (3, 1))
    ]
    assert (orders[0] != orders[1]).any() and (orders[0] != orders[2]).any()


@needs_jax
def test_crop_and_flip():
    import jax

    x = np.random.default_rng(0).normal(size=(200, 6, 5, 2)).astype("float32")
    out = np.asarray(trial.crop_and_flip(x, jax.random.key(0)))
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    found = []
    for image, source in zip(out, padded, strict=True):
        crops = {
            (top, left, step): source[top : top + 6, left : left + 5][:, ::step]
            for top in range(9)
            for left in range(9)
            for step in (1, -1)
        }
        found.append(
            next(k for k, crop in crops.items() if np.array_equal(crop, image))
        )
    tops, lefts, steps = np.transpose(found)
    assert set(tops) == set(lefts) == set(range(9)) and set(steps) == {1, -1}


@needs_jax
def test_keep_and_restore_change_nothing_for_those_that_stay(together):
    expected, scores = together
    trials = make(TRIALS)
    trials.train(1), trials.evaluate()
    arrays = trials.arrays()
    trials.keep([2, 0])
    assert trials.trials == [TRIALS[2], TRIALS[0]]
    restored = make([TRIALS[1], TRIALS[2]])
    restored.restore(arrays)
    assert restored.epoch == 1
    for each, places in ((trials, [2, 0]), (restored, [1, 2])):
        last = each.train(EPOCHS - 1) | each.evaluate()
        for key, values in last.items():
            np.testing.assert_allclose(values, scores[-1][key][places], **SAME)
        for k, place in enumerate(places):
            assert_same(weights(each, k), weights(expected, place))


@needs_jax
def test_restored_equals_uninterrupted_bit_by_bit():
    one = make(TRIALS[:1])
    one.train(), one.evaluate()
    arrays = one.arrays()
    expected = one.train(2) | one.evaluate()
    final = weights(one, 0)
    one.restore(arrays)
    assert one.epoch == 1
    for key, values in (one.train(2) | one.evaluate()).items():
        np.testing.assert_array_equal(values, expected[key])
    assert_same(weights(one, 0), final, rtol=0, atol=0)


@needs_jax
def test_a_diverged_trial_does_not_touch_the_others(together):
    expected, scores = together
    trials = make([TRIALS[0], LOST, TRIALS[1]])
    for epoch in range(EPOCHS):
        found = trials.train() | trials.evaluate()
        assert not np.isfinite(found["train_loss"][1])
        for key, values in found.items():
            np.testing.assert_allclose(values[[0, 2]], scores[epoch][key][:2], **SAME)
    np.testing.assert_array_equal(trials.diverged, [False, True, False])
    assert any(np.isnan(value).any() for value in weights(trials, 1).values())
    assert all(np.isfinite(v).all() for v in weights(trials, 1, best=True).values())
    for k, place in ((0, 0), (2, 1)):
        assert_same(weights(trials, k), weights(expected, place))


@needs_jax
def test_a_trial_in_the_place_of_another_one(together):
    """It starts anew, keeps its own epochs, and the other trial goes on."""
    expected, scores = together
    trials = make([LOST, TRIALS[1]])
    trials.train(1), trials.evaluate()
    trials.replace(0, TRIALS[2])
    assert trials.trials == [TRIALS[2], TRIALS[1]]
    np.testing.assert_array_equal(trials.epochs, [0, 1])
    np.testing.assert_array_equal(trials.diverged, [False, False])
    for epoch in range(2):
        found = trials.train() | trials.evaluate()
        for key, values in found.items():
            both = [scores[epoch][key][2], scores[epoch + 1][key][1]]
            np.testing.assert_allclose(values, both, **SAME)
    np.testing.assert_array_equal(trials.epochs, [2, 3])

    arrays = trials.arrays([1])
    assert population.trials_of(arrays) == [TRIALS[1]]
    others = make([TRIALS[0], TRIALS[1]])
    others.restore(arrays, [1])
    np.testing.assert_array_equal(others.epochs, [0, 3])
    found = others.train() | others.evaluate()
    for key, values in found.items():
        both = [scores[0][key][0], scores[3][key][1]]
        np.testing.assert_allclose(values, both, **SAME)
    assert_same(weights(others, 1), weights(expected, 1))


DEVICES = """
import jax, numpy as np
from tests.recipes.engine.test_population import TRIALS, make
trials = [TRIALS[0], TRIALS[1], TRIALS[2], TRIALS[0]]
one, two = make(trials), make(trials, devices=jax.devices())
assert (one.devices, two.devices) == (1, 2)
for each in (one, two):
    each.train(1)
    each.replace(0, TRIALS[2])
    scores = each.train(1) | each.evaluate()
    each.keep([0, 3])
    each.scores = [scores, each.train(1) | each.evaluate()]
for a, b in zip(one.scores, two.scores):
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=1e-5)
try:
    make(TRIALS, devices=jax.devices())
except ValueError as error:
    assert "divides the number of trials, 3. Received: 2 devices" in str(error)
    print("all right")
"""


@needs_jax
def test_trials_on_two_devices():
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        cwd=pathlib.Path(__file__).parents[3],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "all right", done.stderr[-3000:]


@needs_jax
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16"])
def test_bfloat16(dtype, tmp_path):
    def build_half(trial):
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy(dtype)
        try:
            return build(trial)
        finally:
            keras.config.set_dtype_policy(policy)

    halves = make(TRIALS[:2], build_half)
    halves.train()
    with run.Run(tmp_path / "a", {}) as recorded:
        recorded.save(epoch=1, **halves.arrays())
        restored = make(TRIALS[:2], build_half)
        restored.restore(recorded.load())
    found = [weights(each, 0) for each in (halves, restored)]
    stored = {str(value.dtype) for value in found[0].values()}
    assert ("bfloat16" in stored) == (dtype == "bfloat16")
    for a, b in zip(found[0].values(), found[1].values(), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    model = halves.model(0)
    assert model.layers[-1].compute_dtype == "bfloat16"
    assert all(np.isfinite(halves.train()["train_loss"]))


@needs_jax
def test_bad_arguments():
    with pytest.raises(ValueError, match="`trials` must have one.*trials=\\[\\]"):
        make([])
    with pytest.raises(ValueError, match="positive learning rates.*learning_rate': 0"):
        make([TRIALS[0] | {"learning_rate": 0}])
    with pytest.raises(ValueError, match="between 1 and 35.*batch_size=36"):
        make(TRIALS[:1], batch_size=36)
    one = make(TRIALS[:1])
    for indices in ([], [0, 0], [1]):
        with pytest.raises(ValueError, match="`indices` must be distinct.*from 0 to 0"):
            one.keep(indices)
    with pytest.raises(ValueError, match="lacks.*'learning_rate': 0.05"):
        make(TRIALS[:2]).restore(one.arrays())


@pytest.mark.skipif(IS_JAX, reason="of the other backends")
def test_other_backends_are_refused():
    with pytest.raises(ValueError, match="KERAS_BACKEND=jax.*Received: backend"):
        make(TRIALS)
