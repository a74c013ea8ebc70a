"""A wrong argument is refused at once, by name, with what was received.

Every public callable and argument has an entry in `tests.support.arguments`, or a test
fails.
"""

import inspect
import os
import traceback
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_norms
from keras_norms import surgery
from keras_norms._checks import arguments
from tests.support.arguments.diagnostics import DIAGNOSTICS
from tests.support.arguments.kinds import POOL
from tests.support.arguments.layers import LAYERS, SURGERY
from tests.support.arguments.spaces import SPACES
from tests.support.arguments.values import Tripwire
from tuner import spaces

PACKAGES = tuple(os.path.dirname(m.__file__) for m in (keras_norms, spaces))
ENTRIES = LAYERS | SURGERY | DIAGNOSTICS | SPACES


def exported(module):
    """Public objects by name, those of public modules in it too."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from exported(value) if hasattr(value, "__all__") else defined(value)
        else:
            yield name, value


def defined(module):
    """What a module that lists no names defines."""
    for name, value in inspect.getmembers(module, callable):
        if not name.startswith("_") and value.__module__ == module.__name__:
            yield f"{module.__name__.rpartition('.')[2]}.{name}", value


def methods(name, cls):
    """The methods that a public class adds to those of Keras and of its own bases."""
    bases = [base for base in cls.__mro__[1:]]
    for method, value in vars(cls).items():
        is_public = inspect.isfunction(value) and not method.startswith("_")
        if is_public and not any(method in vars(base) for base in bases):
            yield f"{name}.{method}", value


def public():
    """Name -> parameters of every public callable. Results are not made by users."""
    sources = [exported(keras_norms), exported(surgery), defined(spaces)]
    found = {}
    for name, value in (pair for source in sources for pair in source):
        if inspect.isclass(value) and issubclass(value, tuple):
            continue
        found[name] = value
        if inspect.isclass(value):
            found.update(methods(name, value))
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: {
            parameter.name
            for parameter in inspect.signature(value).parameters.values()
            if parameter.kind not in kinds and parameter.name != "self"
        }
        for name, value in found.items()
    }


# Called by `FusedCBN` with what `call` gets, which Keras has looked at.
CALLS = {"CBN.scale_and_shift"}
CASES = [
    pytest.param(name, argument, id=f"{name}({argument})")
    for name, entry in ENTRIES.items()
    for argument in entry.kinds
]


def test_every_public_argument_has_an_entry():
    expected = public()
    without_arguments = {name for name, needed in expected.items() if not needed}
    for name in set(expected) - CALLS - without_arguments:
        assert name in ENTRIES, f"{name} has no entry in tests.support.arguments"
        assert set(ENTRIES[name].kinds) == expected[name], name


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
    assert where.startswith(PACKAGES), (where, message)
    assert f"`{argument}`" in message, (arguments.shown(value), message)
    _, _, received = message.partition("Received: ")
    assert received, message
    return received


def descriptions(value):
    """What may stand for a value in a message, or for one of its elements."""
    yield arguments.shown(value)
    yield type(value).__name__
    as_array = np.asarray(list(value) if isinstance(value, (dict, set)) else value)
    yield arguments.shown(as_array)
    yield str(as_array.shape)
    if not as_array.size:
        yield from ("[]", "0 ")
    elif as_array.ndim:
        yield type(as_array[0]).__name__
    if isinstance(value, (list, tuple, dict, set)):
        yield from (text for each in value for text in descriptions(each))


@pytest.mark.parametrize("name, argument", CASES)
def test_a_wrong_argument_is_refused(name, argument, armed):
    kind = ENTRIES[name].kinds[argument]
    for value in POOL:
        if kind.fits(value):
            continue
        received = refusal(name, argument, value)
        assert any(text in received for text in descriptions(value)), received
    for value in kind.wrong:
        refusal(name, argument, value)


@pytest.mark.parametrize(
    "name, argument", [case for case in CASES if ENTRIES[case.values[0]].is_quick]
)
def test_what_fits_is_taken(name, argument):
    entry = ENTRIES[name]
    for value in filter(entry.kinds[argument].fits, POOL):
        entry.call(**{**entry.good, argument: value})


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.tuples(parts)
        | st.dictionaries(st.text(max_size=2), parts, max_size=2)
    ),
    max_leaves=4,
)


@settings(deadline=None)
@given(value=ANYTHING, case=st.sampled_from(CASES))
def test_anything_else_is_refused_too(value, case):
    name, argument = case.values
    entry = ENTRIES[name]
    if entry.kinds[argument].fits(value):
        return
    if isinstance(value, str) and argument in ("loss", "norm", "tune"):
        return  # There are such losses, norms and hyperparameters.
    Tripwire.armed = True
    try:
        refusal(name, argument, value)
    finally:
        Tripwire.armed = False


@pytest.mark.parametrize(
    "name", ["CBN", "NoisyBN", "LpNorm", "WS", "CWN", "WN", "FusedCBN"]
)
def test_arguments_of_every_layer(name):
    entry = ENTRIES[name]
    with pytest.raises(ValueError, match="no_such_thing"):
        entry.call(**entry.good, no_such_thing=1)
    with pytest.raises(ValueError, match="name.*Received: name=3"):
        entry.call(**entry.good, name=3)
    with pytest.raises(ValueError, match="trainable.*Received: trainable=3"):
        entry.call(**entry.good, trainable=3)
    with pytest.raises(ValueError, match="float99"):
        entry.call(**entry.good, dtype="float99")
