"""A wrong argument is refused at once, by name, with what was received.

Every public callable and argument is in `tests.support.arguments.table`.
"""

import os
import traceback

import numpy as np
import pytest

import keras_norms
from keras_norms._checks import arguments
from tests.support.arguments.public import ENTRIES, LAYER_NAMES, QUICK
from tests.support.arguments.table import FEW, KINDS, OWN, POOL, Tripwire
from tests.support.backend import later
from tuner import spaces

PACKAGES = tuple(os.path.dirname(m.__file__) for m in (keras_norms, spaces))
CASES = [
    pytest.param(name, argument, id=f"{name}({argument})")
    for name, entry in ENTRIES.items()
    for argument in entry.kinds
]
several = pytest.mark.parametrize("values", [FEW, *later(POOL)], ids=["few", "all"])


def test_the_table_has_nothing_else():
    assert KINDS.keys() <= {name for each in ENTRIES.values() for name in each.kinds}
    for name, kinds in OWN.items():
        assert kinds.keys() <= ENTRIES[name].kinds.keys()


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
        first = as_array[0]
        yield from (type(first).__name__, str(first), arguments.shown(first))
    if isinstance(value, (list, tuple, dict, set)):
        yield from (text for each in value for text in descriptions(each))


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
@pytest.mark.parametrize(
    "name, argument", [case for case in CASES if case.values[0] in QUICK]
)
def test_what_fits_is_taken(name, argument, values):
    entry = ENTRIES[name]
    for value in filter(entry.kinds[argument].fits, values):
        entry.call(**{**entry.good, argument: value})


@pytest.mark.parametrize("name", LAYER_NAMES)
def test_arguments_of_every_layer(name):
    entry = ENTRIES[name]
    for wrong, message in (
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"name": 3}, "name.*Received: name=3"),
        ({"dtype": "float99"}, "float99"),
    ):
        with pytest.raises(ValueError, match=message):
            entry.call(**entry.good, **wrong)
