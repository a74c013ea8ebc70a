"""Layers compiled for H100 GPUs by XLA's GPU compiler, which needs no GPU."""

import json

import pytest

from tests.support.backend import jax_only
from tests.support.processes import run

pytestmark = jax_only

SCRIPT = """
from benchmarks.gpu import compiler
import json
import jax, keras
from keras_norms import CBN, FusedCBN

shape, dtype = (128, 32, 32, 128), "bfloat16"

def cost(model, topology="1x1x1"):
    chips = compiler.chips(topology)
    if not model.built:
        model.build(shape)

    def step(trainable, state, x, g):
        def forward(trainable, x):
            return model.stateless_call(trainable, state, x, training=True)

        y, pullback, state = jax.vjp(forward, trainable, x, has_aux=True)
        # As in a network, where other layers stand between both passes.
        y, g = jax.lax.optimization_barrier((y, g))
        return y, state, pullback(g)

    x = chips.batch(shape[0], shape[1:], dtype)
    return compiler.cost(jax.jit(step).lower(
        chips.shapes(model.trainable_variables),
        chips.shapes(model.non_trainable_variables), x, x,
    ).compile())

def conv(size):
    return keras.layers.Conv2D(128, size, padding="same")

def cbn():
    layer = CBN()
    layer.set_learning_rate(0.01)
    return layer

def between(size, *layers):
    relu = keras.layers.ReLU
    return cost(keras.Sequential([conv(size), relu(), *layers, relu()]))

keras.config.set_dtype_policy("mixed_bfloat16")
costs = {
    "bn": cost(keras.layers.BatchNormalization()),
    "cbn": cost(cbn()),
    "shared": cost(cbn(), "1x1x4"),
}
for size in (1, 3):
    costs |= {
        f"none {size}": between(size, conv(size)),
        f"cbn {size}": between(size, cbn(), conv(size)),
        f"fused_cbn {size}": between(size, FusedCBN(conv(size), cbn())),
    }
print(json.dumps(costs))
"""


@pytest.mark.thorough
def test_passes_and_collectives_of_a_layer():
    pytest.importorskip("jax_cuda12_plugin")
    costs = json.loads(run("-c", SCRIPT).splitlines()[-1])
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
        # Two: the output of the convolution before, beside the activation, and x.
        assert passes[f"fused_cbn {size}"] - without < 2.2


PROGRAM = """HloModule jit_step

%inside (p: f32[8]) -> f32[8] {
  ROOT %add.9 = f32[8]{0} add(%p, %p)
}

ENTRY %main (x: f32[8], y: bf16[2,3]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %y = bf16[2,3]{1,0} parameter(1)
  %fusion.1 = (f32[8]{0}, f32[]) fusion(%x, %y), kind=kInput, calls=%inside
  %part = f32[8]{0} get-tuple-element(%fusion.1), index=0
  %conv = (f32[8]{0}, u8[4]{0}) custom-call(%part, %x), custom_call_target="conv"
  %first = f32[8]{0} get-tuple-element(%conv), index=0
  %start = f32[8]{0} all-reduce-start(%first), channel_id=1
  %done = f32[8]{0} all-reduce-done(%start)
  ROOT %copy = f32[8]{0} copy(%done)
}
"""


def test_kernels_and_their_bytes():
    pytest.importorskip("jax")
    from benchmarks.gpu import compiler

    assert compiler.kernels(PROGRAM) == [
        ("fusion", 32 + 12 + 32 + 4),
        ("custom-call", 32 + 32 + 32 + 4),
        ("copy", 32 + 32),
    ]
