"""Every public callable, with values that fit its arguments."""

import inspect

import keras_norms
from tests.support.arguments import table


class Entry:
    """A callable, arguments that fit, and the kind of each argument."""

    def __init__(self, name, call):
        self.call = call
        own, good = table.OWN.get(name, {}), table.GOOD | table.OWN_GOOD.get(name, {})
        if name.startswith("theorems."):
            own, good = table.THEOREM, table.GOOD_FOR_THEOREM
        arguments = inspect.signature(call).parameters.values()
        named = [
            a for a in arguments if a.kind not in (a.VAR_KEYWORD, a.VAR_POSITIONAL)
        ]
        self.kinds = {a.name: own.get(a.name) or table.KINDS[a.name] for a in named}
        self.good = {a.name: good[a.name] for a in named if a.default is a.empty}


def members(module):
    """Public objects by name, including those of public modules inside."""
    listed = getattr(module, "__all__", None)
    for name, value in inspect.getmembers(module):
        if name not in listed if listed else name.startswith("_"):
            continue
        if inspect.ismodule(value) and listed:
            yield from members(value)
        elif listed:
            yield name, value
        elif getattr(value, "__module__", None) == module.__name__:
            yield f"{module.__name__.rpartition('.')[2]}.{name}", value


# Objects of the classes whose methods are public.
OBJECTS = {"CBN": table.CBN, "WN": table.WN, "Objective": table.OBJECTIVE}


def methods(name, cls):
    """The methods that a public class adds to those of its bases."""
    for method, value in vars(cls).items():
        is_public = inspect.isfunction(value) and not method.startswith("_")
        if is_public and not any(method in vars(base) for base in cls.__mro__[1:]):
            yield f"{name}.{method}", getattr(OBJECTS[name], method)


def entries():
    """Every public callable, without result classes, which users do not construct."""
    for name, value in members(keras_norms):
        if inspect.isclass(value):
            yield from methods(name, value) if name in OBJECTS else ()
        if not inspect.isclass(value) or not issubclass(value, tuple):
            yield name, value
    yield "CBN.set_learning_rate", table.CBN.set_learning_rate
    yield "CBN.follow", table.CBN.follow


CALLS = dict(entries())
# `FusedCBN` calls it with the arguments of `call`, which Keras has checked.
del CALLS["CBN.scale_and_shift"]
for relu in "relu", "relu6":
    del CALLS[f"activations.{relu}"]  # called by layers, with computed values
ENTRIES = {name: Entry(name, call) for name, call in CALLS.items()}
# Fitting values are tried for these only; others would call the model.
QUICK = ["CBN", "NoisyBN", "LpNorm", "WS", "CWN", "WN", "FusedCBN"]
QUICK += ["CBN.set_learning_rate", "CBN.follow"]
