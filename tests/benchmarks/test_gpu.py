"""Layers and recipes compiled by the compilers of TPUs and H100 GPUs, with neither."""

import json

import pytest

from tests.support.backend import jax_only
from tests.support.processes import run

pytestmark = jax_only

LAYERS = """
import sys
from importlib import import_module
kind, topologies = sys.argv[1], sys.argv[2:]
compiler = import_module(f"benchmarks.{kind}.compiler")
import json
import jax, keras
from keras_norms import CBN, FusedCBN

shape, dtype = (128, 32, 32, 128), "bfloat16"

def cost(*layers, topology=topologies[0]):
    chips = compiler.chips(topology)
    model = keras.Sequential([keras.Input(shape[1:]), *layers])

    def step(trainable, state, x, g):
        def forward(trainable, x):
            return model.stateless_call(trainable, state, x, training=True)

        y, pullback, state = jax.vjp(forward, trainable, x, has_aux=True)
        if kind == "gpu":
            # As in a network, where other layers stand between both passes.
            y, g = jax.lax.optimization_barrier((y, g))
        return y, state, pullback(g)

    x = chips.batch(shape[0], shape[1:], dtype)
    parts = model.trainable_variables, model.non_trainable_variables
    compiled = jax.jit(step).lower(*map(chips.shapes, parts), x, x).compile()
    return compiler.cost(compiled)

def conv(size):
    return keras.layers.Conv2D(128, size, padding="same")

def cbn():
    layer = CBN()
    layer.set_learning_rate(0.01)
    return layer

def between(size, *layers):
    relu = keras.layers.ReLU
    return cost(conv(size), relu(), *layers, relu())

keras.config.set_dtype_policy("mixed_bfloat16")
costs = {"cbn": cost(cbn()), "bn": cost(keras.layers.BatchNormalization())}
if kind == "tpu":
    costs["fused"] = cost(FusedCBN(conv(3), cbn()))
else:
    costs["shared"] = cost(cbn(), topology=topologies[1])
    for size in (1, 3):
        costs[f"none {size}"] = between(size, conv(size))
        costs[f"cbn {size}"] = between(size, cbn(), conv(size))
        costs[f"fused_cbn {size}"] = between(size, FusedCBN(conv(size), cbn()))
print(json.dumps(costs))
"""


@pytest.mark.thorough
def test_bytes_and_collectives_of_a_layer_on_tpus():
    pytest.importorskip("libtpu")
    printed = run("-c", LAYERS, "tpu", "v5e:2x2", XLA_FLAGS="")  # not those of CPUs
    costs = json.loads(printed.splitlines()[-1])
    assert costs["cbn"]["gigabytes_moved"] < costs["bn"]["gigabytes_moved"]
    # One each way.
    assert costs["cbn"]["collectives"] == {"all-reduce": 2}
    # The gradient of the kernel too; and nothing of it waits for the statistics.
    assert costs["fused"]["collectives"] == {"all-reduce": 1}
    assert costs["bn"]["all_reduces"] > 2


@pytest.mark.thorough
def test_passes_and_collectives_of_a_layer_on_gpus():
    pytest.importorskip("jax_cuda12_plugin")
    costs = json.loads(run("-c", LAYERS, "gpu", "1x1x1", "1x1x4").splitlines()[-1])
    passes = {
        name: cost["gigabytes_moved"] * 1e9 / (2 * 128 * 32 * 32 * 128)
        for name, cost in costs.items()
    }
    # Forward x, x -> y; backward x, g, x, g -> dx.
    assert passes["cbn"] == pytest.approx(8, abs=0.1)
    assert passes["cbn"] < passes["bn"]
    assert costs["cbn"]["all_reduces"] == 0
    assert passes["shared"] == pytest.approx(8, abs=0.1)
    # One each way.
    assert costs["shared"]["collectives"] == {"all-reduce": 2}
    for size in "13":
        without = passes[f"none {size}"]
        assert passes[f"cbn {size}"] - without < 4.2
        assert passes[f"fused_cbn {size}"] - without < 1.3


@pytest.mark.thorough
def test_a_recipe_on_256_chips(tmp_path):
    pytest.importorskip("libtpu")
    output = tmp_path / "check.json"
    run(
        *("-m", "benchmarks.tpu", "--check", "--networks=resnet20"),
        *("--topologies=v5e:16x16", f"--output={output}"),
        XLA_FLAGS="",
    )
    (row,) = json.loads(output.read_text())["rows"]
    # Two for each of 19 norms, and the sum of the gradients.
    assert row["collectives"] == {"all-reduce": 39}
    assert 0 < row["memory_share"] < 0.1
    # An image takes 37.2 million products that do not meet padding, and two gradients
    # as many each; the rest is sums, norms and activations.
    assert 1 < row["gigaflops"] / (128 * 3 * 2 * 0.0372) < 1.1
    # Statistics both ways, and gradients of 16 bits and of 32.
    assert 0.5 < row["collective_megabytes"] < 2


PROGRAM = """HloModule jit_step

%inside (p: f32[8]) -> f32[8] {
  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%p), channel_id=1
}

ENTRY %main (x: f32[8], y: bf16[2,3]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %y = bf16[2,3]{1,0} parameter(1)
  %fusion.1 = (f32[8]{0}, f32[]) fusion(%x, %y), kind=kInput, calls=%inside
  %part = f32[8]{0} get-tuple-element(%fusion.1), index=0
  %conv = (f32[8]{0}, u8[4]{0}) custom-call(%part, %x), custom_call_target="conv"
  %first = f32[8]{0} get-tuple-element(%conv), index=0
  %all-reduce.2 = (f32[8]{0:T(128)}, bf16[2,3]{1,0:T(8,128)(2,1)}) all-reduce(%x, %y)
  %start = (f32[4]{0}) all-gather-start(%first), channel_id=3
  %done = f32[4]{0} all-gather-done(%start)
  %c = f32[8]{0} conditional(%p, %x), branch_computations={%inside}
  ROOT %copy = f32[8]{0} copy(%c)
}
"""


def test_collectives_and_kernels_of_every_step_and_their_bytes():
    from benchmarks import compiled
    from benchmarks.gpu import compiler

    found = compiled.collectives(PROGRAM)
    assert found == [("all-reduce", 8 * 4 + 6 * 2), ("all-gather", 16)]
    assert compiler.kernels(PROGRAM) == [
        ("fusion", 32 + 12 + 32 + 4),
        ("custom-call", 32 + 32 + 32 + 4),
        ("copy", 32 + 32),
    ]


def test_prediction():
    from benchmarks.tpu import check

    row = {"collectives": {"all-reduce": 10}, "collective_megabytes": 20.0}
    # A v5e takes 1 ms for these operations, and 2 ms for these bytes.
    row |= {"gigaflops": 197.0, "gigabytes_moved": 1.638, "memory_gigabytes": 4.0}
    predicted = check.prediction({"slice": "v5e:2x2"} | row)
    assert predicted["memory_share"] == pytest.approx(0.25)
    assert predicted["chip_milliseconds"] == pytest.approx(2.0)
    # 2 hops there and back for each, and 2 * 20 MB through two links of 50 GB/s.
    assert predicted["collective_milliseconds"] == pytest.approx(0.04 + 0.4)
    assert predicted["efficiency"] == pytest.approx(2 / 2.44)
    # 8 hops along each ring, and four links.
    predicted = check.prediction({"slice": "v5e:16x16"} | row)
    assert predicted["collective_milliseconds"] == pytest.approx(0.32 + 0.2)
    alone = {"slice": "v5e:1x1", "collectives": {}, "collective_megabytes": 0.0}
    assert check.prediction(row | alone)["efficiency"] == 1
