"""What TensorFlow replicas compute, as JSON: run by `tests/devices`.

    KERAS_BACKEND=tensorflow python -m tests.programs.replicas [<name of a case> ...]

Without names all cases, and what else replicas do. With `--output=FILE.json` a report
of all cases, and of Keras' layer, is written instead. A process can divide its CPU into
devices only once, before it uses any.
"""

import functools

import numpy as np
import tensorflow as tf

from keras_norms import AMAT
from tests.support import device_cases, rates
from tests.support.backend import numpy
from tests.support.device_cases import CASES, Case, build, cbn, data, errors, in_groups

# How many replicas, and how many samples they share.
SIZES = {
    None: [(2, 13)],
    "cbn": [(4, 3)],
    "cbn, ratio": [(8, 13)],
    "fused": [(4, 13)],
    "lp inf": [(4, 13)],
}


def step(layer, x, upstream, *mask):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, **dict(zip(["mask"], mask)))
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * upstream[..., : y.shape[-1]])
    weights = [variable.value for variable in layer.trainable_variables]
    return y, *tape.gradient(loss, [x, *weights])


@functools.cache  # two strategies would take the same keys for different collectives
def mirrored(count):
    # As TensorFlow's own tests do: groups of another size take other keys.
    tf.distribute.MirroredStrategy._collective_key_base = 1000 * count
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def distributed(strategy, layer, arrays):
    """The step on replicas, each with its part, and the program."""
    count = strategy.num_replicas_in_sync

    def divided(array):
        parts = np.array_split(array, count)
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    # One program for all sizes of parts.
    function = tf.function(
        lambda *a: strategy.run(step, args=(layer, *a)), reduce_retracing=True
    )
    inputs = [divided(array) for array in arrays]
    program = function.get_concrete_function(*inputs)

    def run():
        outputs = map(strategy.experimental_local_results, program(*inputs))
        return [[*map(numpy, parts)] for parts in outputs]

    return run, program


def two_steps(case, count, batch):
    """Outputs, gradients and state, and how many collectives a replica starts."""
    strategy = mirrored(count)
    with strategy.scope():
        layer = build(case, batch, synchronized=count > 1)
    run, program = distributed(strategy, layer, data(case, batch))
    found = {"outputs": [], "gradients": [], "state": []}
    for _ in range(2):
        y, dx, *gradients = run()
        found["outputs"] += [np.concatenate(y), np.concatenate(dx)]
        found["gradients"] += map(sum, gradients)
        found["state"] += map(numpy, layer.non_trainable_variables)
    operations = [operation.type for operation in program.graph.get_operations()]
    return found, sum(name.startswith("Collective") for name in operations) / count


def compared(case, count, batch):
    """The errors of two steps on `count` replicas against those on one device."""
    expected, _ = two_steps(case, 1, batch)
    actual, collectives = two_steps(case, count, batch)
    return {**errors(actual, expected), "collectives": collectives}


def check_not_synchronized(case):
    """Each replica normalises alone, and both keep the mean of their averages."""
    strategy = mirrored(2)
    arrays = data(case, 8)
    with strategy.scope():
        layer = build(case, 8)
    outputs = distributed(strategy, layer, arrays)[0]()[0]
    alone = [build(case, 4) for _ in range(2)]
    parts = np.split(arrays[0], 2)
    expected = [numpy(one(part, training=True)) for one, part in zip(alone, parts)]
    state, first, second = (
        [numpy(v) for v in each.non_trainable_variables] for each in (layer, *alone)
    )
    assert np.abs(first[0] - second[0]).max() > 0.01
    mean = [(a + b) / 2 for a, b in zip(first, second)]
    found = errors(
        {"outputs": outputs, "state": state}, {"outputs": expected, "state": mean}
    )
    assert max(found.values()) < 1e-5, found
    for variable in layer.non_trainable_variables:
        np.testing.assert_array_equal(*map(numpy, variable.value.values))


def noisy(make, x):
    """The outputs of two replicas; the first one's is that of a single device."""
    strategy = mirrored(2)
    with strategy.scope():
        layer = make(synchronized=True)
        layer.build(x.shape)
    call = functools.partial(layer, training=True)
    outputs = tf.function(lambda x: strategy.run(call, args=(x,)))(tf.constant(x))
    first, second = strategy.experimental_local_results(outputs)
    assert np.abs(first - make()(x, training=True)).max() < 1e-5
    return first, second


def check_amat():
    """The rate of each step is the optimizer's, also on replicas."""
    with mirrored(2).scope():
        model, norm = rates.recorder(rates.PIECEWISE)
    x = np.repeat(np.eye(6, rates.MOST_STEPS, dtype="float32"), 2, axis=0)
    for part in np.split(x, 2):
        model.fit(part, part[:, :1], 2, verbose=0, shuffle=False, callbacks=[AMAT()])
    rates.check(model, norm, rates.rates_of(rates.PIECEWISE, range(6)))
    assert numpy(model.optimizer.iterations) == 6
    assert model.distribute_strategy.num_replicas_in_sync == 2


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 8,
    )
    checks = [
        functools.partial(check_not_synchronized, CASES["cbn, ratio"]),
        functools.partial(check_not_synchronized, Case(in_groups(cbn))),
        functools.partial(device_cases.check_noise, noisy),
        check_amat,
    ]
    device_cases.main(compared, SIZES, *checks)
