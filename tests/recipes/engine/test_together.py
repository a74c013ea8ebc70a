import itertools
import os

import keras
import numpy as np
import pytest

from keras_norms import CBN
from recipes import models, train
from recipes.engine import (
    classifier,
    data,
    joint_training,
    optimizers,
    population,
    run,
    trial,
)
from tests.support import images as files_of
from tests.support import small
from tests.support import synthetic_search as synthetic
from tests.support.backend import jax_only, later, numpy
from tests.support.processes import run as run_python
from tests.support.small import dense_networks as dense_networks

pytestmark = jax_only

TINY = {"model": "resnet8", "activation": "tanh", "epochs": 2}
TINY |= {"train_size": 48, "batch_size": 16}


def one(tmp_path, **more):
    return classifier.Saved(**TINY | small.places(tmp_path) | more)


def several(tmp_path):
    """Three runs, of which one diverges."""
    changes = {"seed": 0}, {"seed": 1}, {"learning_rate": 1e30}
    return [one(tmp_path, **change) for change in changes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return joint_training.train(several(tmp_path_factory.mktemp("finished")))


def test_runs_are_recorded_as_those_of_train(finished, tmp_path):
    alone, first = train.train(one(tmp_path)), finished[0]
    added = {"trials_at_once", "images_per_second"}
    assert first.results.keys() ^ alone.results.keys() == added
    name = alone.results["name"].replace("-seed0-", "-seed0-populationTrue-")
    assert first.results["name"] == name and first.results["trials_at_once"] == 3
    for a, b in zip(first.metrics, alone.metrics, strict=True):
        assert a.keys() == b.keys()
    images = data.load("digits", train_size=48)
    for result in (outcome.results for outcome in finished[:2]):
        model = keras.models.load_model(result["saved_model"])
        logits = keras.ops.convert_to_numpy(model(images.x_test))
        hits = logits.argmax(-1) == images.y_test
        np.testing.assert_allclose(hits.mean(), result["best_test_accuracy"], atol=1e-6)
    # One diverged, and the others went on.
    results = [outcome.results for outcome in finished]
    assert [result["diverged"] for result in results] == [False, False, True]
    assert [result["epochs"] for result in results] == [2, 2, 1]
    assert results[2]["train_loss"] is None and results[2]["saved_model"] is None


def test_interrupted_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
    """With a checkpoint, and one of the runs complete."""
    monkeypatch.setattr(joint_training, "CHECKPOINT_SECONDS", 0)
    asked = several(tmp_path)
    # Of three runs the settings, two checkpoints, and the results of one.
    with synthetic.ends_at_write(7, KeyboardInterrupt()):
        joint_training.train(asked)
    # All epochs were behind.
    monkeypatch.setattr(population.Population, "train", None)
    found = joint_training.train(asked)
    for outcome, reference in zip(found, finished, strict=True):
        lines = (small.without_times(each.metrics) for each in (outcome, reference))
        assert next(lines) == next(lines)
    assert not list(tmp_path.glob("*/*/checkpoint.npz"))
    assert joint_training.train(asked) == found


def test_runs_must_be_those_of_one_network(tmp_path):
    with pytest.raises(ValueError, match="differ in seed, rho.*that differ in norm"):
        joint_training.train([one(tmp_path), one(tmp_path, norm="bn")])
    streamed = one(tmp_path, dataset="imagenet2012", train_size=None)
    with pytest.raises(ValueError, match="imagenet2012.*cannot be arrays"):
        joint_training.train([streamed])


EPOCHS = 4
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
    first, second = (CBN(rho=trial["rho"], omega=trial["omega"]) for _ in range(2))
    x = inputs = keras.Input((6, 5, 2))
    x = first(keras.layers.Conv2D(4, 3, activation="tanh")(x))
    x = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(x))
    x = second(keras.layers.Dropout(0.2)(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def images():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 58).astype("int32")
    x = rng.normal(size=(58, 6, 5, 2)).astype("float32") + labels[:, None, None, None]
    return data.ImageData(x[:35], labels[:35], x[35:], labels[35:], 3)


def make(trials, build=build, **more):
    settings = {"epochs": EPOCHS, "batch_size": 8, "augment": True} | more
    return population.Population(build, trials, images(), **settings)


def weights(trials, index, **more):
    return {v.path: numpy(v) for v in trials.model(index, **more).variables}


def assert_same(a, b):
    for x, y in zip(a.values(), b.values(), strict=True):
        np.testing.assert_allclose(x, y, **SAME)


@pytest.fixture(scope="module")
def together():
    """Trials, of which the last one diverges, and the scores after each epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "TEST_BATCH_SIZE", 10)  # of 23 test images
        trials = make([*TRIALS, LOST])
        scores = [trials.train() | trials.evaluate() for _ in range(EPOCHS)]
    return trials, scores


def by_hand(settings, amat=True, replacement=False, optimizer=None, **more):
    """The weights, and the mean loss of each epoch, by the steps of Keras."""
    import jax

    x, y = images()[:2]
    keras.utils.set_random_seed(settings["seed"])
    model = build(settings)
    schedule = optimizers.piecewise_schedule(settings["learning_rate"], 4 * EPOCHS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers.OF_NAME[optimizer](schedule, 0.9, 5e-4, **more), loss)
    batches = more.get("gradient_accumulation_steps", 1)
    crop_and_flip = jax.jit(trial.crop_and_flip)
    means = []
    for epoch in range(EPOCHS):
        order_key, key = trial.epoch_keys(settings["seed"], epoch)
        order = np.asarray(jax.random.choice(order_key, 35, (35,), replacement))
        assert (len(set(order.tolist())) < 35) is replacement
        losses = []
        for step in range(4):
            rate = float(schedule(4 * epoch + step)) / batches if amat else -1.0
            for layer in optimizers.followers(model):
                layer.set_learning_rate(rate)
            chosen = order[8 * step : 8 * step + 8]
            batch = crop_and_flip(x[chosen], jax.random.fold_in(key, step))
            model.reset_metrics()  # older Keras returns the mean since then
            losses.append(model.train_on_batch(batch, y[chosen]))
        means.append(np.mean(losses))
    return {v.path: numpy(v) for v in model.variables}, means


OPTIONS = {"amat": False, "replacement": True}, {"gradient_accumulation_steps": 3}
OPTIONS += ({"optimizer": "adam"},)


@pytest.mark.parametrize(
    "k, options", [(1, {}), *later((0, {}), *zip((0, 1, 1), OPTIONS))]
)
def test_a_trial_among_others_equals_the_steps_by_hand(together, k, options):
    """Though one of the others diverges."""
    trials, scores = together
    if options:
        trials = make(TRIALS[:2], **options)
        scores = [trials.train() for _ in range(EPOCHS)]
    values, losses = by_hand(TRIALS[k], **options)
    found = [score["train_loss"][k] for score in scores]
    np.testing.assert_allclose(found, losses, **SAME)
    assert_same(weights(trials, k), values)


def test_scores_are_those_of_the_models(together):
    trials, scores = together
    x, y = images()[2:4]
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for k, settings in enumerate(TRIALS):
        model, best = trials.model(k), trials.model(k, best=True)
        found = {key: values[k] for key, values in scores[-1].items()}
        logits = model(x)
        np.testing.assert_allclose(found["test_loss"], criterion(y, logits), **SAME)
        hits = numpy(logits).argmax(-1) == y
        np.testing.assert_allclose(found["test_accuracy"], hits.mean(), rtol=1e-6)
        hits = numpy(best(x)).argmax(-1) == y
        highest = max(score["test_accuracy"][k] for score in scores)
        np.testing.assert_allclose(hits.mean(), highest, rtol=1e-6)
        for layer in optimizers.followers(model):
            assert layer.omega == settings["omega"]
            rate = pytest.approx(settings["learning_rate"] / 100)
            assert float(layer.learning_rate.value) == rate
    assert not any(np.isfinite(score["train_loss"][3]) for score in scores)
    np.testing.assert_array_equal(trials.diverged, [False] * 3 + [True])
    assert any(np.isnan(value).any() for value in weights(trials, 3).values())
    assert all(np.isfinite(v).all() for v in weights(trials, 3, best=True).values())
    with pytest.raises(ValueError, match="between 1 and 35.*batch_size=36"):
        make(TRIALS[:1], batch_size=36)


def test_convolutions_are_those_of_keras():
    import jax

    x = np.random.default_rng(0).normal(size=(2, 7, 8, 3)).astype("float32")
    kinds = itertools.product((1, 2, 3, 5), (1, 2, 3), ("same", "valid"))
    layers = [keras.layers.Conv2D(4, (size, 3), *others) for size, *others in kinds]
    layers += [keras.layers.Conv2D(4, 3, 2, "same", "channels_first")]
    inputs = [x] * (len(layers) - 1) + [np.moveaxis(x, -1, 1)]
    for layer, each in zip(layers, inputs):
        layer.build(each.shape)

    @jax.jit
    def outputs(inputs):
        return [
            (layer(each), trial.convolution(layer, each, layer.kernel))
            for layer, each in zip(layers, inputs)
        ]

    for expected, found in outputs(inputs):
        # Sums of up to 45 terms of order 1.
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_seeds_and_epochs_have_other_batches():
    import jax

    keys = [trial.epoch_keys(*each)[0] for each in ((3, 0), (4, 0), (3, 1))]
    assert len({str(jax.random.key_data(key)) for key in keys}) == 3
    key = jax.random.key(0)
    crop_and_flip = jax.jit(trial.crop_and_flip)
    files_of.assert_every_crop_and_flip(lambda x: crop_and_flip(x, key))


DEVICES = """
import jax, numpy as np, pytest
from tests.recipes.engine.test_together import TRIALS, make
trials = [TRIALS[0], TRIALS[1], TRIALS[2], TRIALS[0]]
one, two = make(trials), make(trials, devices=jax.devices())
assert (one.devices, two.devices) == (1, 2)
for each in (one, two):
    each.train()
    each.replace(0, TRIALS[2])
    scores = each.train()
    each.keep([0, 3])
    each.scores = [scores, each.train() | each.evaluate()]
for a, b in zip(one.scores, two.scores):
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=1e-5)
with pytest.raises(ValueError, match="number of trials, 3. Received: 2 devices"):
    make(TRIALS, devices=jax.devices())
"""


@pytest.mark.thorough
def test_trials_on_two_devices():
    flags = os.environ.get("XLA_FLAGS", "")
    flags += " --xla_force_host_platform_device_count=2"
    run_python("-c", DEVICES, XLA_FLAGS=flags)


CHIPS = """
from benchmarks.tpu import compiler  # before JAX
import jax
from benchmarks.compiled import COLLECTIVES
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from recipes.engine.population import CURRENT
from tests.recipes.engine.test_together import TRIALS, make
trials = make([*TRIALS, TRIALS[0]])
chips = compiler.chips("v5e:2x2").by_batch.mesh.devices
trials._by_trial = NamedSharding(Mesh(chips, ("trial",)), PartitionSpec("trial"))
current = {key: trials._state[key] for key in CURRENT}
train = current, trials._settings, trials.epochs.astype("uint32"), trials._train_data
test = trials._state, trials._test_data
for name, arguments in {"train_epoch": train, "evaluate": test}.items():
    shapes = jax.eval_shape(lambda *arrays: arrays, *arguments)
    text = trials._compiled(getattr(trials._trial, name), shapes).as_text()
    assert "num_partitions=4" in text
    assert not [kind for kind in COLLECTIVES if f" {kind}" in text]
"""


@pytest.mark.thorough
def test_trials_on_a_slice_of_tpus_exchange_nothing():
    """By their compiler, which needs no TPU."""
    pytest.importorskip("libtpu")
    run_python("-c", CHIPS, XLA_FLAGS="")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16"])
def test_bfloat16(dtype, tmp_path):
    def build_half(trial):
        with models.dtype_policy(dtype):
            return build(trial)

    halves = make(TRIALS[:2], build_half)
    halves.train()
    with run.Run(tmp_path / "a", {}) as recorded:
        recorded.save(epoch=1, **halves.arrays())
        restored = make(TRIALS[:2], build_half)
        restored.restore(recorded.load())
    for a, b in zip(*(weights(each, 0).values() for each in (halves, restored))):
        np.testing.assert_array_equal(a, b, strict=True)
    assert halves.model(0).layers[-1].compute_dtype == "bfloat16"
    assert all(np.isfinite(halves.train()["train_loss"]))
