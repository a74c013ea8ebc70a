"""A wrong argument is refused at once, by name, with what was received.

Every public callable and argument is in `tests.support.arguments.table`.
"""

import inspect
import os
import traceback

import keras
import numpy as np
import pytest

import keras_norms
from keras_norms import ops
from keras_norms._checks import arguments
from tests.support.arguments.public import ENTRIES, QUICK, members
from tests.support.arguments.table import FEW, POOL, Tripwire
from tests.support.backend import later, once

PACKAGE = os.path.dirname(keras_norms.__file__)
CASES = [(name, kind) for name, entry in ENTRIES.items() for kind in entry.kinds]
several = pytest.mark.parametrize(
    "values", [FEW, *later(POOL, marks=[once])], ids=["few", "all"]
)


def test_arguments_are_annotated():
    found = {name: entry.call for name, entry in ENTRIES.items()} | dict(members(ops))
    missing = [
        f"{name}({argument.name})"
        for name, call in found.items()
        for argument in inspect.signature(call).parameters.values()
        if argument.annotation is argument.empty
    ]
    assert not missing


def test_methods_of_layers_are_annotated():
    """A strict type checker refuses a call of a method without annotations."""
    names = "build call compute_output_shape compute_mask get_config from_config"
    names += " affine stored save_own_variables load_own_variables"
    assert not without_types(classes(keras.layers.Layer), names.split())


def test_methods_of_callbacks_are_annotated():
    names = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
    names += ["before_step", "measure", "after_step", "record"]
    assert not without_types(classes(keras.callbacks.Callback), names)


def test_texts_of_results_are_annotated():
    assert not without_types(classes(tuple), ["__str__"])


def classes(base):
    """Public classes that derive from a class."""
    public = {value for _, value in members(keras_norms) if inspect.isclass(value)}
    found = [cls for cls in public if issubclass(cls, base)]
    assert len(found) > 5
    return found


def without_types(found, names):
    """Methods of this package, by name, without the type of what they return."""
    methods = {getattr(cls, name, None) for cls in found for name in names}
    return [
        method.__qualname__
        for method in methods
        if (getattr(method, "__module__", None) or "").startswith("keras_norms")
        and inspect.signature(method).return_annotation is inspect.Signature.empty
    ]


@pytest.mark.parametrize("name", ["CBN", "NoisyBN", "LpNorm"])
def test_attributes_are_declared(name):
    """An editor lists them, and knows them without running the package."""
    norm = getattr(keras_norms, name)
    declared = {each for base in norm.__mro__ for each in inspect.get_annotations(base)}
    made = {"gamma", "beta", *norm.averages, *norm()._of_weights}
    assert made <= declared


@pytest.fixture
def armed(monkeypatch):
    monkeypatch.setattr(Tripwire, "armed", True)


def refusal(name, argument, value):
    """What a callable says of an argument; it is our code that says it."""
    entry = ENTRIES[name]
    with pytest.raises((ValueError, TypeError)) as error:
        entry.call(**{**entry.good, argument: value})
    message = str(error.value)
    where = traceback.extract_tb(error.tb)[-1].filename
    assert where.startswith(PACKAGE), (where, message)
    assert f"`{argument}`" in message, (arguments.shown(value), message)
    _, _, received = message.partition("Received: ")
    assert received, message
    return received


def descriptions(value):
    """What may stand for a value in a message, or for one of its elements."""
    array = np.asarray(list(value) if isinstance(value, (dict, set)) else value)
    yield from (type(value).__name__, str(array.shape), "of shape [", "0 bat", "array(")
    yield from map(arguments.shown, (value, *(array.tolist() if array.ndim else ())))


@several
@pytest.mark.parametrize("name, argument", CASES)
def test_a_wrong_argument_is_refused(name, argument, values, armed):
    kind = ENTRIES[name].kinds[argument]
    for value in values:
        if kind.fits(value):
            continue
        received = refusal(name, argument, value)
        assert any(text in received for text in descriptions(value)), received
    for value in kind.wrong:
        refusal(name, argument, value)


@several
@pytest.mark.parametrize("name, argument", [case for case in CASES if case[0] in QUICK])
def test_what_fits_is_taken(name, argument, values):
    entry = ENTRIES[name]
    for value in filter(entry.kinds[argument].fits, values):
        entry.call(**{**entry.good, argument: value})
