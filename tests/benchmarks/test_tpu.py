"""Layers and recipes compiled for TPUs by the real compiler, which needs no TPU."""

import json

import pytest

from tests.support.backend import jax_only
from tests.support.processes import run

pytestmark = jax_only

SCRIPT = """
from benchmarks.tpu import compiler
import json
import jax, keras
from keras_norms import CBN, FusedCBN

chips = compiler.chips("v5e:2x2")
shape, dtype = (128, 32, 32, 128), "bfloat16"

def cost(layer):
    layer.build(shape)

    def step(trainable, state, x, g):
        def forward(trainable, x):
            return layer.stateless_call(trainable, state, x, training=True)

        y, pullback, state = jax.vjp(forward, trainable, x, has_aux=True)
        return y, state, pullback(g)

    x = chips.batch(shape[0], shape[1:], dtype)
    compiled = jax.jit(step).lower(
        chips.shapes(layer.trainable_variables),
        chips.shapes(layer.non_trainable_variables), x, x,
    ).compile()
    return compiler.cost(compiled)

keras.config.set_dtype_policy("mixed_bfloat16")
cbn = CBN()
cbn.set_learning_rate(0.01)
fused = FusedCBN(keras.layers.Conv2D(128, 3, padding="same"), CBN())
fused.norm.set_learning_rate(0.01)
candidates = {"cbn": cbn, "fused": fused, "bn": keras.layers.BatchNormalization()}
costs = {name: cost(layer) for name, layer in candidates.items()}
print(json.dumps(costs))
"""


@pytest.mark.thorough
def test_bytes_and_collectives_of_a_layer():
    pytest.importorskip("libtpu")
    costs = json.loads(run("-c", SCRIPT).splitlines()[-1])
    assert costs["cbn"]["gigabytes_moved"] < costs["bn"]["gigabytes_moved"]
    # One each way.
    assert costs["cbn"]["collectives"] == {"all-reduce": 2}
    # The gradient of the kernel too; and nothing of it waits for the statistics.
    assert costs["fused"]["collectives"] == {"all-reduce": 1}
    assert costs["bn"]["all_reduces"] > 2


@pytest.mark.thorough
def test_a_recipe_on_256_chips(tmp_path):
    pytest.importorskip("libtpu")
    output = tmp_path / "check.json"
    run(
        *("-m", "benchmarks.tpu", "--check", "--networks=resnet20"),
        *("--topologies=v5e:16x16", f"--output={output}"),
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


COLLECTIVES = """HloModule jit_step

%branch (x: f32[8]) -> f32[8] {
  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%x), channel_id=1
}

ENTRY %main (x: f32[8], y: bf16[2,3]) -> f32[8] {
  %all-reduce.2 = (f32[8]{0:T(128)}, bf16[2,3]{1,0:T(8,128)(2,1)}) all-reduce(%x, %y)
  %start = (f32[4]{0}) all-gather-start(%x), channel_id=3
  %done = f32[4]{0} all-gather-done(%start)
  ROOT %c = f32[8]{0} conditional(%p, %x), branch_computations={%branch}
}
"""


def test_collectives_of_every_step_are_counted_with_their_bytes():
    from benchmarks import compiled

    found = compiled.collectives(COLLECTIVES)
    assert found == [("all-reduce", 8 * 4 + 6 * 2), ("all-gather", 16)]


def test_prediction():
    from benchmarks.tpu import check

    row = {
        "gigaflops": 197.0,  # 1 ms of a v5e
        "gigabytes_moved": 1.638,  # 2 ms
        "memory_gigabytes": 4.0,
        "collectives": {"all-reduce": 10},
        "collective_megabytes": 20.0,
    }
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
