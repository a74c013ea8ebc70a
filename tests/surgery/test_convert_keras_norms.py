"""convert to norms of Keras and to none: what is carried over, against float64."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_norms import CBN, FusedCBN, LpNorm, NoisyBN, convert
from tests.support import surgery_models as m
from tests.support.backend import numpy

# Over which axes of (samples, positions, groups, channels of a group) each normalises.
AXES = {"group_norm": (1, 3), "instance_norm": (1,), "layer_norm": (2, 3)}
CLASSES = {
    "group_norm": layers.GroupNormalization,
    "instance_norm": layers.GroupNormalization,
    "layer_norm": layers.LayerNormalization,
    "rms_norm": layers.RMSNormalization,
}
CHANGES = r"could not be preserved.*\['norm'\]"


def float64(x):
    return numpy(x).astype("float64")


def expected(x, name, gamma, beta, epsilon):
    x = x.astype("float64").reshape(len(x), -1, 2, 4)
    if name == "rms_norm":
        y, beta = x / np.sqrt(np.square(x).mean((2, 3), keepdims=True) + epsilon), 0
    else:
        variance = x.var(AXES[name], keepdims=True)
        y = (x - x.mean(AXES[name], keepdims=True)) / np.sqrt(variance + epsilon)
    return y.reshape(len(x), -1, 8) * gamma + beta


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("norm", [layers.BatchNormalization, CBN])
def test_gamma_and_beta_are_carried_over(name, norm):
    """Of CBN, they are the deviation and mean of what it makes."""
    model, x = m.model_of((5, 8), m.apply(norm, name="norm")), m.images(3, 5, 8)
    old = model.get_layer("norm")
    gamma, beta = float64(old.gamma), float64(old.beta)
    if norm is CBN:
        old.moving_square.assign(beta**2 + 1)
        # It makes gamma (x - mean + beta) / root(square + epsilon).
        gamma, beta = gamma / np.sqrt(beta**2 + 1), gamma * beta / np.sqrt(beta**2 + 1)
    with m.saying(CHANGES):
        new = convert(model, name).get_layer("norm")
    assert type(new) is CLASSES[name]
    assert new.epsilon == old.epsilon
    found = numpy(new(x)).reshape(3, -1, 8)
    np.testing.assert_allclose(
        found, expected(x, name, gamma, beta, old.epsilon), rtol=1e-3, atol=1e-4
    )
    plain = convert(model, CLASSES[name], preserve=False).get_layer("norm")
    assert all(np.ptp(w) == 0 for w in plain.get_weights())


def test_groups():
    """As many as fit, of 4 channels; those that a layer was given."""
    for channels, groups in ((3, 1), (7, 1), (8, 2), (24, 6), (64, 16), (200, 25)):
        model = m.model_of((2, channels), m.bn)
        new = m.quiet(convert, model, "group_norm", preserve=False)
        assert new.layers[-1].groups == groups
    given = m.quiet(convert, model, layers.GroupNormalization(groups=20, epsilon=0.1))
    assert (given.layers[-1].groups, given.layers[-1].epsilon) == (20, 0.1)


def test_one_number_is_not_normalised():
    model = m.model_of((4, 3), m.bn, layers.Flatten(), m.apply(CBN, name="stays"))
    new = m.check(convert, model, norm="instance_norm", tolerance=np.inf, says="stays")
    assert type(new.layers[1]) is layers.GroupNormalization
    assert type(new.get_layer("stays")) is CBN


def test_batch_norm_in_the_place_of_others():
    fused = FusedCBN(layers.Dense(4), CBN(rho=2.0, name="inside"))
    norms = m.apply(CBN, rho=2.0), m.apply(NoisyBN), m.apply(LpNorm, p=2), m.bn
    model = m.model_of((4,), *norms, fused)
    for layer in m.of_class(model, CBN):
        layer.moving_square.assign(numpy(layer.beta) ** 2 + 1)
        layer.average_weight.assign(1.0)
    new = m.check_convert(model, "batch_norm", says="")
    assert len(m.norms_in(new)) == 5 and len(new.layers) == len(model.layers) + 1
    # Statistics of others are those of data.
    group = m.apply(layers.GroupNormalization, 2, name="norm")
    model, x = m.model_of((5, 8), group), m.images(32, 5, 8)
    with m.saying(CHANGES):
        new = convert(model, "batch_norm", data=x).get_layer("norm")
    old = model.get_layer("norm")
    np.testing.assert_array_equal(numpy(new.gamma), numpy(old.gamma))
    np.testing.assert_allclose(numpy(new.moving_mean), x.mean((0, 1)), atol=1e-4)
    with pytest.warns(UserWarning, match=r"statistics.*unknown.*\['norm'\]"):
        convert(model, "batch_norm")


def test_none():
    norms = (keras.layers.BatchNormalization, CBN, NoisyBN, LpNorm)
    rms = m.apply(layers.RMSNormalization, name="norm")
    conv = m.apply(layers.Conv1D, 4, 3, use_bias=False)
    model = m.model_of((6, 4), conv, m.bn, m.relu, m.apply(CBN), conv, m.bn)
    new = m.check_convert(model, "none", says="")
    assert not m.of_class(new, norms) and len(new.layers) == len(model.layers) - 3
    new = m.quiet(convert, model, "none", preserve=False)
    assert len(new.layers) == len(model.layers) - 3
    assert all(layer.use_bias for layer in m.of_class(new, layers.Conv1D))
    alone = m.model_of((4,), m.relu, m.apply(CBN, name="alone"), m.relu)
    new = m.check_convert(alone, "none", says="")
    assert m.names(new)[2] == "alone_affine"
    # Its scale goes into the layer before.
    model = m.model_of((4,), m.dense(4), rms)
    scale = model.get_layer("norm").scale
    scale.assign([1.0, 2.0, 3.0, 4.0])
    with m.saying(CHANGES):
        new = convert(model, "none")
    found = numpy(new.layers[-1].kernel) / numpy(model.layers[-2].kernel)
    np.testing.assert_allclose(found, np.tile([1.0, 2.0, 3.0, 4.0], (4, 1)), rtol=1e-5)
