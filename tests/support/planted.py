"""Models with channels that a smaller model can do without, for tests of prune."""

from keras_norms import prune, recalibrate
from tests.support import surgery_models as m
from tests.support.backend import numpy


def settle(model):
    """Random weights; each BatchNormalization has the statistics of its input.

    Random channels then vary as gamma says, and none is dead by accident.
    """
    return recalibrate(m.randomize(model), m.batch_for(model, 16, seed=5), verbose=0)


def put(variable, index, value):
    """Assign a part of a variable."""
    array = numpy(variable).copy()
    array[index] = value
    variable.assign(array)


def kill(norm, channels, beta):
    """Make channels of a norm the constant `beta`."""
    put(norm.gamma, channels, 0)
    put(norm.beta, channels, beta)


def twin(layers, source, copy):
    """Make channel `copy` of what layers make, or keep apart, equal to `source`."""
    for weight in [weight for layer in layers for weight in layer.weights]:
        if weight.shape and weight.shape[-1] > max(source, copy):
            put(weight, (..., copy), numpy(weight)[..., source])


def layers_of(model, *names):
    return [model.get_layer(name) for name in names]


def check(model, tolerance=1e-5, **options):
    """Prune: the same outputs, also on unseen data."""
    pruned = prune(model, m.batch_for(model, 16), **options)
    m.assert_same_outputs(pruned.model, model, m.batch_for(model, 16, 11), tolerance)
    assert pruned.error <= tolerance and pruned.largest <= tolerance
    old, new = (set(map(type, x._flatten_layers())) for x in (model, pruned.model))
    assert new <= old
    return pruned


def removed(pruned):
    return {name: list(numbers) for name, numbers in pruned.removed.items()}
