"""Timed training on a small network, and the networks that benchmarks train."""

import functools
import mmap
from unittest import mock

import keras
import pytest

from benchmarks import amat, memory, network, networks, tables, training
from keras_norms import CBN, FusedCBN, LpNorm
from tests.support import small
from tests.support.backend import BACKEND, later, numpy, thorough_on

pytestmark = thorough_on("jax")


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    def make(size):
        return small.convolutions("", (size, size, 3), 2, "bn", "relu")

    monkeypatch.setitem(networks.NETWORKS, "small", (8, make))


class Slow(keras.callbacks.Callback):
    """Takes seconds of each step, on a clock that nothing else moves."""

    now, steps = 0.0, 0

    def perf_counter(self):
        return self.now

    def on_train_batch_begin(self, batch, logs=None):
        self.now += 64.0 if batch == 0 else 0.25
        self.steps += 1


def test_seconds_of_a_step_hold_its_callbacks_and_no_start(monkeypatch):
    model = training.compile_model(networks.build("small", "bn"))
    data = training.endless_batch(model, 2)
    slow = Slow()
    monkeypatch.setattr(training, "time", slow)
    assert training.seconds_per_step(model, data, 3, [slow]) == 0.25
    assert slow.steps == 5


def test_amat_where_there_is_cbn():
    for norm, count in (("bn", 0), ("fused_cbn", 1)):
        assert len(training.callbacks_for(networks.build("small", norm))) == count


def test_seconds_of_amat_are_those_of_the_steps_that_are_timed():
    turn, told = amat.candidate("constant", True, "small", 8, 2, steps=3)
    turn()
    assert len(told.seconds) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("rate", amat.RATES)
def test_amat(rate):
    row = amat.measure(rate, "small", 8, 2, steps=2, rounds=3)
    assert 0 < row["direct_share"] < 1
    low, high = row["ratio_interval"]
    assert low <= row["ratio"] <= high
    assert rate in tables.of({"benchmark": "amat", "rows": [row]})


def test_memory(monkeypatch):
    if BACKEND == "jax":
        few, more = (
            memory.by_the_compiler(f"small:32:{batch}", "bn", "float32")["peak_bytes"]
            for batch in (8, 16)
        )
        # More than the images themselves, which are of three channels.
        assert more - few > 8 * 32 * 32 * 3 * 4
    else:
        # Not this process' own, of which earlier tests may give memory back.
        meter = mock.Mock(**{"now.return_value": 100, "peak.return_value": 150})
        monkeypatch.setattr(memory, "_meter", lambda: meter)
        found = memory.of_this_process("small:32:8", "bn", "float32")
        assert found == {"peak_bytes": 50}
        assert [name for name, *_ in meter.method_calls] == ["now", "reset", "peak"]


def test_memory_of_an_image_takes_two():
    with pytest.raises(ValueError, match="Two images or more.* Received: small:8:1"):
        memory.of_an_image("small:8:1", "bn", "float32")


def test_peak_of_this_process():
    meter = memory.Resident()
    meter.reset()
    before = meter.now()
    with mmap.mmap(-1, 2**24) as block:
        block.write(bytes(2**24))
    assert meter.peak() - before > 0.9 * 2**24


@pytest.mark.parametrize("norm", ["bn", "none", *later("cbn", "fused_cbn")])
def test_resnet20_has_the_norm(norm):
    model = networks.build("resnet20", norm, learning_rate=0.25)
    layers = model._flatten_layers()
    kinds = [type(layer) for layer in layers]
    cbns = 19 * (norm in ("cbn", "fused_cbn"))
    assert kinds.count(keras.layers.BatchNormalization) == 21 * (norm == "bn")
    assert kinds.count(CBN) == cbns
    assert kinds.count(FusedCBN) == cbns * (norm == "fused_cbn")
    rates = [float(numpy(x.learning_rate)) for x in layers if isinstance(x, CBN)]
    assert rates == [0.25] * cbns
    assert (network.bytes_of_passes(model, 2, 0) == 0) == (norm == "none")


def test_build():
    for norm, p in (("lp_norm", 2), ("lp_norm:1", 1)):
        layers = networks.build("resnet20", norm)._flatten_layers()
        assert [each.p for each in layers if isinstance(each, LpNorm)] == [p] * 21
    model = networks.build("resnet20", "cbn", skip="^stage[01]_")
    names = [each.name for each in model.layers if isinstance(each, CBN)]
    assert names and not any(name.startswith(("stage0", "stage1")) for name in names)
    assert networks.build("vgg16", "bn", 16).input_shape == (None, 16, 16, 3)
    assert networks.build("vgg16", "bn").input_shape == (None, 32, 32, 3)
    with pytest.raises(ValueError, match="norm=layer"):
        networks.build("resnet20", "layer")


@pytest.mark.parametrize(
    "dtype, cache, expected",
    [
        ("float32", 0, 8 * 4 * (96 + 160)),
        ("mixed_bfloat16", 0, 8 * 2 * (96 + 160)),
        # 3 * 4 * 96 and 3 * 4 * 160 bytes: inside the cache each moves once.
        ("float32", 2000, 5 * 4 * (96 + 160)),
        ("float32", 1500, 4 * (5 * 96 + 8 * 160)),
    ],
)
def test_bytes_of_passes(dtype, cache, expected):
    bn = functools.partial(keras.layers.BatchNormalization, dtype=dtype)
    conv = keras.layers.Conv2D(5, 1, dtype=dtype)
    model = keras.Sequential([keras.Input((4, 4, 3)), bn(), conv, bn()])
    assert network.bytes_of_passes(model, 2, cache) == expected


def test_parse():
    assert networks.parse("resnet20:32:128") == ("resnet20", 32, 128)
    for text in ("resnet20", "resnet20:32", "other:1:2", "vgg16:a:1", "vgg16:0:1"):
        with pytest.raises(ValueError, match=f"Received: {text}"):
            networks.parse(text)
    assert networks.parse("other:1:2", any_name=True) == ("other", 1, 2)
