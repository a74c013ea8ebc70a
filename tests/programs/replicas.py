"""What TensorFlow replicas compute, as JSON: run by `tests/devices`.

    KERAS_BACKEND=tensorflow python -m tests.programs.replicas [<name of a case> ...]

Without names all cases, and what else replicas do. With `--output=FILE.json` a report
of all cases, and of Keras' layer, is written instead. A process can divide its CPU into
devices only once, before it uses any.
"""

import functools

import numpy as np
import tensorflow as tf

from keras_norms import AMAT, NoisyBN
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


def step(layer, x, upstream, mask=None):
    with tf.GradientTape() as tape:
        tape.watch(x)
        arguments = {} if mask is None else {"mask": mask}
        y = layer(x, training=True, **arguments)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * upstream[..., : y.shape[-1]])
    weights = [variable.value for variable in layer.trainable_variables]
    return y, *tape.gradient(loss, [x, *weights])


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
        outputs = program(*inputs)
        return [strategy.experimental_local_results(output) for output in outputs]

    return run, program


def two_steps(run, layer):
    """Outputs and gradients of the whole batch, and the state after each step."""
    found = {"outputs": [], "gradients": [], "state": []}
    for _ in range(2):
        y, dx, *gradients = ([*map(numpy, parts)] for parts in run())
        found["outputs"] += [np.concatenate(y), np.concatenate(dx)]
        found["gradients"] += map(sum, gradients)
        found["state"] += map(numpy, layer.non_trainable_variables)
    return found


def compared(case, count, batch):
    """The errors of two steps on `count` replicas against those on one device."""
    strategy = mirrored(count)
    arrays = data(case, batch)
    single = build(case, batch)
    with strategy.scope():
        layer = build(case, batch, synchronized=True)
    run, program = distributed(strategy, layer, arrays)
    tensors = [*map(tf.constant, arrays)]
    expected = two_steps(lambda: ([v] for v in step(single, *tensors)), single)
    operations = [operation.type for operation in program.graph.get_operations()]
    # How many a replica starts in a step.
    collectives = sum(name.startswith("Collective") for name in operations) / count
    return {**errors(two_steps(run, layer), expected), "collectives": collectives}


@functools.cache  # two strategies would take the same keys for different collectives
def mirrored(count):
    # As TensorFlow's own tests do: groups of another size take other keys.
    tf.distribute.MirroredStrategy._collective_key_base = 1000 * count
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])


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
    first, second = ([numpy(v) for v in one.non_trainable_variables] for one in alone)
    assert np.abs(first[0] - second[0]).max() > 0.01
    state = [numpy(v) for v in layer.non_trainable_variables]
    found = errors(
        {"outputs": [*map(numpy, outputs)], "state": state},
        {"outputs": expected, "state": [(a + b) / 2 for a, b in zip(first, second)]},
    )
    assert max(found.values()) < 1e-5, found
    for variable in layer.non_trainable_variables:
        one, other = map(numpy, variable.value.values)
        np.testing.assert_array_equal(one, other)


def check_noise():
    """An element has its own on each replica, a channel that of the whole batch."""
    strategy = mirrored(2)
    x = tf.constant(data(CASES["noisy"], 6)[0])
    for jitter in (0.1, 0.0):
        arguments = {"seed": 3, "mean_jitter": jitter, "scale_jitter": jitter}
        single = NoisyBN(**arguments)(x, training=True)
        with strategy.scope():
            layer = NoisyBN(synchronized=True, **arguments)
            layer.build(x.shape)

        @tf.function
        def run(x, layer=layer):
            return strategy.run(lambda x: layer(x, training=True), args=(x,))

        first, second = strategy.experimental_local_results(run(x))
        apart = np.abs(first - second).max()
        assert apart > 0.1 if jitter else apart < 1e-5, apart
        # The first one's is that of a single device.
        assert np.abs(first - single).max() < 1e-5


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


def main():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 8,
    )
    unsynchronized = [CASES["cbn, ratio"], Case(in_groups(cbn))]
    checks = [functools.partial(check_not_synchronized, c) for c in unsynchronized]
    device_cases.main(compared, SIZES, *checks, check_noise, check_amat)


if __name__ == "__main__":
    main()
