"""convert, fold and prune keep the function of networks that nobody has thought of."""

import warnings

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from keras_norms import CBN, LpNorm, NoisyBN, convert, fold, prune
from tests.support import surgery_models as m
from tests.support.backend import numpy, precision, tensorflow_only

X = m.images(12, 6, 6, 3).astype("float64")
# Of each kind, functions of the shape of a tensor that make a layer for it.
KINDS = {
    "linear": [
        lambda shape: layers.Conv2D(4, 3, padding="same"),
        lambda shape: layers.Conv2D(6, 1, use_bias=False, activation="relu"),
        lambda shape: layers.Conv2D(4, 3, 2, padding="same", use_bias=False),
        lambda shape: layers.Conv2D(shape[-1], 3, groups=shape[-1], padding="same"),
        lambda shape: layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2),
        lambda shape: layers.SeparableConv2D(4, 3, padding="same", use_bias=False),
        lambda shape: layers.Conv2DTranspose(4, 3, padding="same"),
        lambda shape: layers.Dense(4, activation="tanh"),
        lambda shape: layers.EinsumDense("abcd,de->abce", (*shape[1:3], 4)),
        lambda shape: nested(shape[-1]),
    ],
    "norm": [
        lambda shape: layers.BatchNormalization(),
        lambda shape: layers.BatchNormalization(scale=False),
        lambda shape: layers.BatchNormalization(axis=1),
        lambda shape: CBN(rho=2.0),
        lambda shape: CBN(decouple=False, center=False),
        lambda shape: NoisyBN(),
        lambda shape: LpNorm(p=1),
    ],
    "other": [
        lambda shape: layers.ReLU(),
        lambda shape: layers.Activation("sigmoid"),
        lambda shape: layers.LeakyReLU(0.1),
        lambda shape: layers.PReLU("random_uniform", shared_axes=[1, 2]),
        lambda shape: layers.Dropout(0.3),
        lambda shape: layers.ZeroPadding2D(),
        lambda shape: layers.MaxPooling2D(2, padding="same"),
        lambda shape: layers.AveragePooling2D(2, padding="same"),
        lambda shape: layers.UpSampling2D(),
        lambda shape: layers.Rescaling(2.0, 1.0),
    ],
}
NUMBERS = st.integers(0, 99)
STEPS = st.tuples(st.sampled_from([*KINDS, "again", "sum", "concat"]), NUMBERS, NUMBERS)
ENDS = layers.GlobalAveragePooling2D, layers.GlobalMaxPooling2D, layers.Flatten


def nested(channels):
    inputs = keras.Input((None, None, channels))
    conv = layers.Conv2D(4, 3, padding="same")(inputs)
    return keras.Model(inputs, layers.ReLU()(layers.BatchNormalization()(conv)))


def network(steps, end):
    """A step reads one of the last three tensors; `again` calls a layer once more."""
    tensors, made = [keras.Input((6, 6, 3))], []
    for kind, place, which in steps:
        x = tensors[-1 - place % min(len(tensors), 3)]
        size = 4 if kind == "sum" else 3  # of the shapes that must be alike
        others = [t for t in tensors if t is not x and t.shape[:size] == x.shape[:size]]
        if kind in KINDS:
            layer = KINDS[kind][which % len(KINDS[kind])](x.shape)
            made.append((layer, x.shape))
            tensors.append(layer(x))
        elif kind == "again":
            fits = [layer for layer, shape in made if shape == x.shape]
            tensors += [fits[which % len(fits)](x)] if fits else []
        elif others:
            cls = layers.Add if kind == "sum" else layers.Concatenate
            tensors.append(cls()([x, others[which % len(others)]]))
    outputs = layers.Dense(3)(ENDS[end]()(tensors[-1]))
    return m.randomize(keras.Model(tensors[0], outputs))


def plant(model):
    """Of each layer with a kernel a unit that is another's twin, and a dead one."""
    for number, layer in enumerate(m.of_class(model, (layers.Conv2D, layers.Dense))):
        units = layer.kernel.shape[-1]
        one, other, dead = ((number + i) % units for i in range(3))
        for weight in layer.weights if units > 2 else ():
            value = numpy(weight).copy()
            value[..., other] = value[..., one]
            value[..., dead] *= weight is layer.bias
            weight.assign(value)


def pruned(model):
    try:
        return prune(model, X).model
    except ValueError as error:
        if "must have a channel that could go" in str(error):
            return model
        raise


@pytest.mark.thorough
@tensorflow_only
@settings(deadline=None, max_examples=settings.default.max_examples // 8)
@given(st.lists(STEPS, min_size=4, max_size=12), st.integers(0, 2))
def test_the_function_stays(steps, end):
    with precision("float64"):
        model = network(steps, end)
        plant(model)
        for surgery, *arguments in (
            (fold,),
            (convert, CBN(rho=2.0), True, X),
            (convert, "none"),
            (convert, "noisy_bn"),
            (lambda model: fold(convert(model, "cbn", data=X)),),
            (pruned,),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                new = surgery(model, *arguments)
            if not any("could not be preserved" in str(w.message) for w in caught):
                m.assert_same_outputs(new, model, X, 1e-7)
