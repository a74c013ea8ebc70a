"""Timed training, and the benchmarks of training, on a small network."""

import mmap

import keras
import pytest

from benchmarks import amat, memory, network, networks, tables, training
from tests.support.backend import BACKEND, thorough_on

pytestmark = thorough_on("jax")


def small(size):
    layers = [keras.Input((size, size, 3))]
    for _ in range(2):
        layers.append(keras.layers.Conv2D(4, 3, use_bias=False))
        layers += [keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    return keras.Sequential(layers)


@pytest.fixture
def small_network(monkeypatch):
    monkeypatch.setitem(networks.NETWORKS, "small", (8, small))


class Slow(keras.callbacks.Callback):
    """Takes seconds of each step, on a clock that nothing else moves."""

    now, steps = 0.0, 0

    def perf_counter(self):
        return self.now

    def on_train_batch_begin(self, batch, logs=None):
        self.now += 64.0 if batch == 0 else 0.25
        self.steps += 1


def test_seconds_of_a_step_hold_its_callbacks_and_no_start(monkeypatch):
    model = training.compile_model(small(8))
    data = training.endless_batch(model, 2)
    slow = Slow()
    monkeypatch.setattr(training, "time", slow)
    assert training.seconds_per_step(model, data, 3, [slow]) == 0.25
    assert slow.steps == 5


def test_amat_where_there_is_cbn(small_network):
    assert training.callbacks_for(networks.build("small", "bn")) == []
    assert len(training.callbacks_for(networks.build("small", "fused_cbn"))) == 1


def test_network(small_network):
    rows = network.measure("small", 8, 2, ["none", "bn"], steps=1, rounds=2)
    assert [row["norm"] for row in rows] == ["none", "bn"]
    assert rows[1]["ratio"] == 1
    for row in rows:
        assert row["images_per_second"] == pytest.approx(2 / row["seconds_per_step"])
        assert (row["bytes_of_passes"] == 0) == (row["norm"] == "none")


@pytest.mark.thorough
@pytest.mark.parametrize("rate", amat.RATES)
def test_amat(small_network, rate):
    row = amat.measure(rate, "small", 8, 2, steps=2, rounds=2)
    assert 0 < row["direct_share"] < 1
    low, high = row["ratio_interval"]
    assert low <= row["ratio"] <= high
    assert rate in tables.of({"benchmark": "amat", "rows": [row]})


class Meter:
    """What a process has; the peak is that since the last reset."""

    now = staticmethod(lambda: 100)

    def reset(self):
        self.peak = lambda: 150


def test_memory(small_network, monkeypatch):
    if BACKEND == "jax":
        few, more = (
            memory.by_the_compiler(f"small:32:{batch}", "bn", "float32")["peak_bytes"]
            for batch in (8, 16)
        )
        # More than the images themselves, which are of three channels.
        assert more - few > 8 * 32 * 32 * 3 * 4
    else:
        # Not this process' own, of which earlier tests may give memory back.
        monkeypatch.setattr(memory, "_meter", Meter)
        found = memory.of_this_process("small:32:8", "bn", "float32")
        assert found == {"peak_bytes": 50}


def test_peak_of_this_process():
    meter = memory.Resident()
    meter.reset()
    before = meter.now()
    with mmap.mmap(-1, 2**24) as block:
        block.write(bytes(2**24))
    assert meter.peak() - before > 0.9 * 2**24
