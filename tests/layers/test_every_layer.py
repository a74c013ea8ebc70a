"""What every layer computes, in each of its forms, against float64 references.

The forms are those of `tests.support.any_layer`.
"""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_norms import CBN
from tests.support import any_layer as a
from tests.support.any_layer import CHANNELS, FORMS, FUSED, GROUPS, ONE_EACH, Case
from tests.support.autodiff import FAST, MODES, second_derivative, training_step
from tests.support.backend import BACKEND, later, later_on_jax, numpy, some
from tests.support.batch_reference import finite_differences
from tests.support.layer_reference import REFERENCES
from tests.support.normalizations import in_modes, linear_loss

QUICK = [*FORMS]
IN_MODES = ["CBN", "WN(dense)", "LpNorm(2.5, centered)", "FusedCBN(conv2d_same)"]
POLICIES = {"mixed_bfloat16": 2**-8, "mixed_float16": 2**-11, "float64": 1e-13}
ROUNDED = {*POLICIES}
if BACKEND == "jax":  # Which compiles each of them; the kinds of layers are Keras'.
    QUICK = {*CHANNELS, *ONE_EACH, "FusedCBN(dense, tanh)", "CWN(dense)"}
    IN_MODES, ROUNDED = IN_MODES[:2], ["mixed_bfloat16"]
    del POLICIES["float64"]  # a switch of the process


# Each p and each `norm_of`, CBN with both changes at once, and groups.
FEW = ["CBN", "CBN(coupled, ratio)", "LpNorm(1)", "LpNorm(2, no beta)", "NoisyBN"]
FEW += ["LpNorm(2.5, centered)", "LpNorm(inf)", "CBN(groups)", "NoisyBN(groups)"]
FEW += ["LpNorm(groups)", "LpNorm(1, centered)"]
MASKED = [name for name in CHANNELS | GROUPS if not FORMS[name].inner]
# Eagerly JAX runs the same code, the operations that it compiles otherwise one by one.
EAGER = FORMS if BACKEND != "jax" else [*ONE_EACH, *IN_MODES]
ALL = [(n, mode) for n in FORMS for mode in (MODES if n in EAGER else [FAST])]


def forms(names, quick=ONE_EACH):
    """Those that are quick; all of them in `make test-all`."""
    return pytest.mark.parametrize("name", some(names, quick))


def assert_training_and_inference(each, seed, rate, mode=FAST, *bounds):
    """A step from a random state, and inference after it."""
    x, start = a.example(each, seed, rate)
    each.assign(start)
    reference = a.reference_of(each)
    a.assert_step(each, reference, x, mode, *bounds)
    y, state = a.call(each, x)
    a.assert_near({"y": y}, {"y": reference.inference(each.values(x))}, *bounds)
    np.testing.assert_equal(state, [*map(numpy, each.layer.non_trainable_variables)])


def assert_steps(each, mode=FAST):
    """With the learning rate unknown, known, and large: eta is 0."""
    for seed, rate in enumerate((-1.0, 0.03, 0.2)):
        assert_training_and_inference(each, seed, rate, mode)


IN_SOME = {(name, FAST) for name in QUICK}
IN_SOME |= {(name, mode) for name in IN_MODES for mode in MODES}


@pytest.mark.parametrize(("name", "mode"), some(ALL, IN_SOME))
def test_training_and_inference(name, mode):
    assert_steps(a.case(name), mode)


@forms(CHANNELS)
def test_on_one_device_synchronized_changes_nothing(name):
    assert_steps(a.case(name, synchronized=True))


@pytest.mark.parametrize(("name", "mode"), in_modes(CHANNELS, FEW[:7]))
@pytest.mark.parametrize("samples", [0, 1])
def test_small_batches(name, mode, samples):
    """A batch of one is its mean, exactly, so that many results are 0."""
    each = a.case(name, (samples, 3), axis=-1, epsilon=0.5)
    assert_training_and_inference(each, 6, 0.03, mode, 1e-5, 0.1)


# Where maxima tie

TIES = np.array(
    [
        # Several maxima of both signs; sums and means are exact in float32.
        [3, -3, 3, 1, 0, -1, 2, -2],
        # The same after the mean, 2, is taken away.
        [5, -1, 5, -1, 2, 2, 1, 3],
        [2, 2, 2, 2, 2, 2, 2, 2],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
).T
INFINITE = ["LpNorm(inf)", "LpNorm(inf, centered)"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "mode"), in_modes(INFINITE))
def test_maxima_share_the_gradient(name, masked, mode):
    x = TIES.astype("float32")
    if masked:  # Hidden elements are as large as the maxima, and larger.
        x = np.concatenate([x, 3 * x])
    mask = np.broadcast_to(np.arange(len(x))[:, None] < 8, x.shape)
    each = a.case(name, x.shape, axis=-1, epsilon=0.5)
    # Sums around a moving mean are exact where that is a multiple of 1/8.
    values = a.example(each, 4)[1]
    each.assign({name: np.round(8 * value) / 8 for name, value in values.items()})
    mask = {"mask": mask} if masked else {}
    a.assert_step(each, a.reference_of(each), x, mode, **mask)


SHAPES = st.integers(2, 5).flatmap(lambda rank: st.tuples(*[st.integers(1, 4)] * rank))


@later_on_jax  # Each example is compiled.
@settings(deadline=None, max_examples=settings.default.max_examples // 20)
@given(
    name=st.sampled_from(list(CHANNELS)),
    shape=SHAPES,
    axis=st.integers(0, 4),
    p=st.floats(1, 20),
    seed=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([-1.0, 0.2]) | st.floats(1e-4, 0.1),
)
def test_any_shape_axis_norm_and_state(name, shape, axis, p, seed, rate):
    """`--hypothesis-profile=many` has twenty times the examples."""
    norm = {"p": p} if name == "LpNorm(2.5, centered)" else {}
    # Where a channel is constant, epsilon is all that it is divided by.
    each = a.case(name, shape, axis=axis % len(shape), epsilon=0.1, **norm)
    assert_training_and_inference(each, seed, rate, FAST, 3e-5, 1)


SECOND = [*ONE_EACH, "CBN(coupled, ratio)", "LpNorm(1.5)", "LpNorm(2, centered)"]


@pytest.mark.parametrize(("name", "mode"), some(ALL, [(name, FAST) for name in SECOND]))
def test_second_derivatives(name, mode):
    """Of input and weights together, along one direction, times the rest."""
    each = a.case(name)
    x, start = a.example(each, 2, 0.03)
    each.assign(start)
    reference, values, slope = a.reference_of(each), each.values(x), a.slope_of(each)
    reference.train(values)
    rng = np.random.default_rng(1)
    directions = {k: rng.normal(size=v.shape) for k, v in values.items()}

    def gradients(step):
        moved = {k: v + step * directions[k] for k, v in values.items()}
        return reference.gradients(slope + reference.forward(moved), moved)

    there, back = gradients(1e-6), gradients(-1e-6)
    expected = {k: (there[k] - back[k]) / 2e-6 for k in values}
    directions = [direction.astype("float32") for direction in directions.values()]
    found = second_derivative(each.layer, x, a.loss_of(each), directions, mode)
    a.assert_near(dict(zip(values, found, strict=True)), expected, bound=2e-5)


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("CBN", True),
        ("LpNorm(2.5, centered)", True),
        *later(("LpNorm(2, no beta)", False), ("LpNorm(2.5, centered)", False)),
    ],
)
def test_second_derivative_where_a_channel_has_nothing(name, masked):
    """It is hidden by a mask, or zero."""
    x, direction = np.random.default_rng(0).normal(1, 2, (2, 9, 3)).astype("float32")
    mask = {}
    if masked:
        mask["mask"] = ops.convert_to_tensor(np.tile([True, False, True], (9, 1)))
    else:
        x[:, 1] = 0
    each = a.case(name, x.shape, axis=-1, epsilon=0.1)
    layer, loss = each.layer, a.loss_of(each)
    directions = direction, *map(numpy, layer.trainable_variables)
    second = second_derivative(layer, x, loss, directions, MODES[-1], **mask)[0]
    assert np.all(np.isfinite(second))
    assert np.all(second[:, [0, 2]] != 0)


def test_second_derivative_of_a_channel_that_is_hidden():
    """It is normalised by its averages, which are constants."""
    x, direction = np.random.default_rng(0).normal(1, 2, (2, 9, 2)).astype("float32")
    layer = CBN(epsilon=0.1)
    layer.build(x.shape)
    for name, value in (("gamma", 1.5), ("beta", -0.25), ("moving_mean", 2.0)):
        getattr(layer, name).assign([1.0, value])
    mask = ops.convert_to_tensor(np.tile([True, False], (9, 1)))
    directions = direction, *([0.0, 1.0], [0.0, -0.5])  # x, gamma, beta
    directions = [np.asarray(each, "float32") for each in directions]
    found = second_derivative(
        layer, x, lambda y: ops.sum(y * y * y), directions, MODES[-1], mask=mask
    )

    def gradients(step):
        x, gamma, beta = x64 + step * u64, 1.5 + step, -0.25 - 0.5 * step
        inverse = 1.1**-0.5
        centered = x - 2 + beta
        upstream = 3 * (gamma * inverse * centered) ** 2
        dx = upstream * gamma * inverse
        return [dx, np.sum(upstream * inverse * centered), np.sum(dx)]

    x64, u64 = (each[:, 1].astype("float64") for each in (x, direction))
    for value, after, before in zip(found, gradients(1e-5), gradients(-1e-5)):
        expected = (after - before) / 2e-5
        np.testing.assert_allclose(value[..., 1], expected, rtol=1e-4)


@later_on_jax  # It is of NumPy, but for the layer.
@forms(MASKED, MASKED)
def test_reference_gradients_are_finite_differences(name):
    each = a.case(name)
    x, start = a.example(each, 3, 0.03)
    each.assign(start)
    reference, values = a.reference_of(each), each.values(x)
    g = a.slope_of(each) + reference.train(values)
    for name, gradient in reference.gradients(g, values).items():

        def total(value, name=name):
            return np.sum(g * reference.forward({**values, name: value}))

        expected = finite_differences(total, values[name])
        a.assert_near({name: gradient}, {name: expected}, 1e-6)


# Precision


@forms(CHANNELS | FUSED | GROUPS)
@pytest.mark.parametrize("policy", some(POLICIES, ROUNDED))
def test_policies(name, policy):
    # What is rounded: y, the two terms of its gradient and their sum, dx. FusedCBN also
    # rounds the normalised input, the kernel and the product.
    bound = (8 if FORMS[name].inner else 5) * POLICIES[policy]
    each = a.case(name, dtype=policy)
    wide = "float64" if policy == "float64" else "float32"
    x = np.random.default_rng(0).normal(1, 2, each.shape).astype(wide)
    x = numpy(ops.cast(x, each.layer.compute_dtype))
    start = a.example(each, 0, 0.03)[1]  # which half precision cannot hold
    each.assign(start)
    reference, values = a.reference_of(each), each.values(x)
    expected = a.expected_results(each, reference, values)
    found = a.results(each, x)
    assert keras.backend.standardize_dtype(found["y"].dtype) == each.layer.compute_dtype
    for weight in each.layer.weights:
        assert keras.backend.standardize_dtype(weight.dtype) == wide
    # Statistics are those of the rounded inputs.
    state = {k: found.pop(k) for k in each.state()}
    a.assert_near(state, {k: expected.pop(k) for k in state}, min(bound, 1e-5))
    # Keras casts weights in a call, and not in `stateless_call`.
    each.assign(start)
    each.layer(ops.convert_to_tensor(x), training=True)
    a.assert_near(each.state(), state)
    # These are sums, with an error of each term.
    terms = np.abs(a.slope_of(each) + expected["y"]).sum()
    for name in {"beta", "gamma", "bias"} & expected.keys():
        factor = np.abs(expected["y"]).max() if name == "gamma" else 1
        error = np.abs(found.pop(name) - expected[name]).max()
        assert error < bound * factor * terms / expected.pop(name).size, name
    a.assert_near(found, expected, bound)
    y, _ = a.call(each, x)
    a.assert_near({"y": y}, {"y": reference.inference(values)}, bound)


@forms(CHANNELS | FUSED)
def test_integers_are_cast(name):
    each = a.case(name)
    x = np.random.default_rng(0).integers(-9, 9, each.shape, "int32")
    for training in (True, False):
        found, expected = (
            {"y": a.call(each, v, training)[0]} for v in (x, x.astype("float32"))
        )
        a.assert_near(found, expected)


# Masks, and layers that do not train


def of_channels(each, values, channels):
    return {
        k: np.moveaxis(v, each.axis * (v.ndim > 1), 0)[channels] if np.ndim(v) else v
        for k, v in values.items()
    }


@pytest.mark.parametrize(("name", "mode"), in_modes(MASKED, FEW))
def test_what_a_mask_hides_is_not_there(name, mode):
    """Of each channel something else; outputs of what is hidden count too."""
    each = a.case(name)
    rng = np.random.default_rng(1)
    mask, unused = rng.random((2, *each.shape)) < 0.6
    hidden = np.moveaxis(mask, each.axis, 0)
    hidden[0] = False  # of which nothing is seen
    hidden[1, : each.form.arguments.get("group_size", 0)] = False  # in a group
    unused &= ~mask
    g = np.where(unused, 0, a.slope_of(each)).astype("float32")
    step = training_step(each.layer, linear_loss(g), mode)
    names = ["y", "x", *(v.name for v in each.layer.trainable_variables)]
    for seed, rate in enumerate((0.03, -1.0)):
        x, start = a.example(each, seed, rate)
        each.assign(start)
        reference, values = a.reference_of(each), each.values(x) | {"mask": mask}
        y = reference.train(values)
        expected = {"y": y} | reference.gradients(g, values) | reference.state()
        # An element that enters nowhere may be anything.
        anything = rng.choice([np.nan, -np.inf, 1e38], x.shape).astype("float32")
        step_of_these = step(np.where(unused, anything, x), mask=mask)
        found = dict(zip(names, step_of_these, strict=True)) | each.state()
        found["y"] = np.where(unused, y, found["y"])
        for channels in (slice(1), slice(1, None)):  # Those of the first may be huge.
            a.assert_near(
                of_channels(each, {k: found[k] for k in expected}, channels),
                of_channels(each, expected, channels),
            )

    state = each.state()
    found = step(x, mask=np.zeros_like(mask))
    assert all(np.all(np.isfinite(value)) for value in found)
    np.testing.assert_equal(each.state(), state)


@forms(FORMS)
def test_frozen_is_inference(name):
    each = a.case(name, name="frozen")
    x, start = a.example(each, 5, 0.03)
    each.assign(start)
    expected, state = a.call(each, x)
    in_training = a.call(each, x, training=True)[0]
    assert (np.abs(in_training - expected).max() > 0.1) == bool(state)
    each.layer.trainable = False
    frozen = Case(each.form, each.layer, each.shape)  # Compiled anew.
    y, state = a.call(frozen, x, training=True)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_equal(state, [*map(numpy, each.layer.non_trainable_variables)])


# Shapes


@forms(FORMS, QUICK)
def test_shapes(name):
    form, each = FORMS[name], a.case(name)
    expected = a.reference_of(each).inference(each.values(np.zeros(each.shape))).shape
    assert tuple(each.layer.compute_output_shape(each.shape)) == expected
    symbolic = form.make()(keras.Input(batch_shape=form.shape), training=True)
    assert tuple(symbolic.shape) == expected
    if form.cls in REFERENCES:
        unknown = (None,) * len(form.shape)
        assert tuple(each.layer.compute_output_shape(unknown)) == unknown
        sizes = {tuple(weight.shape) for weight in each.layer.weights}
        assert sizes <= {(each.channels,), ()} and each.layer.supports_masking
    if form.cls not in REFERENCES or each.axis % len(form.shape):
        symbolic = form.make()(keras.Input(form.shape[1:]))
        assert tuple(symbolic.shape) == (None, *expected[1:])
