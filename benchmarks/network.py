"""Training steps of whole networks, with each normalisation, through Keras `fit`.

    python -m benchmarks.network                          # TensorFlow, 2 CPU cores
    KERAS_BACKEND=jax python -m benchmarks.network
    KERAS_BACKEND=jax python -m benchmarks.network \\
        --networks=resnet50:224:128 --dtype_policy=mixed_bfloat16 --steps=20   # a GPU

The networks are those of `benchmarks.networks`, trained by SGD with momentum on one
batch that is already on the device; CBN with the AMAT callback, as in normal use; WS,
CWN and WN with BatchNormalization after them. All candidates are compiled first and
then take turns of some steps of `fit`, waiting for the device at both ends of a turn. A
ratio is the median over the rounds of time / BatchNormalization's time in the same
round, and its spread is the interquartile range.

The floor is `none`, the same network without normalisation. On a CPU there is also the
time for the passes of the normalisation over its tensors, at the copy bandwidth
measured in the same run (see `PASSES`), if none is fused with a neighbour.

Prints a table; --output also writes it as JSON with versions and machine.
"""

import math
import statistics

import keras
from absl import app, flags

from benchmarks import compare, machine, networks, training
from keras_norms import CBN, LpNorm, NoisyBN
from keras_norms.layers.fused_cbn import FusedCBN

# Passes over the input that a layer makes in a training step, if the tensor does not
# fit into the cache and if it does. BN, CBN, LpNorm, NoisyBN: read x twice, write y;
# read x and the upstream gradient twice, write dx. FusedCBN: read x; add a term of x to
# dx.
PASSES = {
    keras.layers.BatchNormalization: (8, 5),
    CBN: (8, 5),
    LpNorm: (8, 5),
    NoisyBN: (8, 5),
    FusedCBN: (4, 3),
}


def bytes_of_passes(model, batch, cache):
    """The bytes that the normalisations of activations move, each pass by itself."""
    total = 0
    for layer in model.layers:
        if type(layer) in PASSES:
            width = 4 if layer.compute_dtype == "float32" else 2
            size = width * batch * math.prod(layer.input.shape[1:])
            outside, inside = PASSES[type(layer)]
            total += size * (outside if 3 * size > cache else inside)
    return total


def measure(
    network, size, batch, norms, *, steps, rounds, jit_compile="auto", skip=None
):
    """Time one network with every norm. Returns a list of rows.

    Args:
        network: A name in `networks.NETWORKS`.
        size: Height and width of the images.
        batch: Images per step.
        norms: Names in `networks.NORMS`, `"bn"` among them.
        steps: Steps that a candidate makes in its turn.
        rounds: Turns of each candidate, 3 or more: two have no quartiles.
        jit_compile: Argument of `compile`.
        skip: Regular expression; layers with a match in their name get no CBN.
    """
    cache = machine.cache_bytes()
    turns, passes = {}, {}
    for norm in norms:
        model = networks.build(network, norm, size, skip=skip)
        passes[norm] = bytes_of_passes(model, batch, cache)
        training.compile_model(model, jit_compile)
        callbacks = training.callbacks_for(model)
        turns[norm] = training.turn(model, batch, steps, callbacks)
    times = compare.take_turns(turns, rounds)
    return [
        {
            "network": network,
            "image_size": size,
            "batch": batch,
            "norm": norm,
            "seconds_per_step": statistics.median(times[norm]),
            "images_per_second": batch / statistics.median(times[norm]),
            **compare.ratio(times[norm], times[networks.YARDSTICK]),
            "bytes_of_passes": passes[norm],
        }
        for norm in norms
    ]


def define_flags():
    networks.define_flags()
    flags.DEFINE_string("skip", None, "Layers that get no CBN, a regular expression.")
    flags.DEFINE_integer("steps", 4, "Steps of a turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 10, "Rounds to time.", lower_bound=3)


def main(_):
    values = flags.FLAGS
    jit_compile = "auto" if values.jit_compile is None else values.jit_compile
    bandwidth = machine.copy_bandwidth()
    rows = []
    settings = {"steps": values.steps, "rounds": values.rounds}
    settings |= {"jit_compile": jit_compile, "skip": values.skip}
    for text in values.networks:
        keras.utils.clear_session(free_memory=True)  # this also resets the policy
        keras.config.set_dtype_policy(values.dtype_policy)
        rows += measure(*networks.parse(text), values.norms, **settings)
    compare.report(
        values.output,
        "network",
        rows,
        dtype_policy=values.dtype_policy,
        copy_gigabytes_per_second=bandwidth / 1e9,
        **settings,
    )


if __name__ == "__main__":
    define_flags()
    app.run(main)
