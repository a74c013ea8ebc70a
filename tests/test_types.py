"""Public signatures are annotated, and the package says so."""

import inspect
import pathlib

import keras_norms
from keras_norms import diagnostics, layers, ops, surgery

# What overrides methods of Keras, which has no annotations.
OVERRIDES = "on_", "compute_", "save_own", "load_own", "from_config"


def public():
    """Public functions, and the methods that public classes define, by name."""
    modules = [keras_norms, layers, surgery, diagnostics, diagnostics.theorems]
    modules += [getattr(ops, name) for name in ops.__all__ if name != "backend"]
    for module in modules:
        own = [k for k, v in vars(module).items() if inspect.getmodule(v) is module]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if inspect.isfunction(value) and not name.startswith("_"):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value) and not issubclass(value, tuple):
                for key, method in vars(value).items():
                    if inspect.isfunction(method) and key.strip("_") in (key, "init"):
                        yield f"{value.__name__}.{key}", method


def test_arguments_are_annotated():
    found = dict(public())
    assert {"keras_norms.convert", "CBN.__init__", "WN.data_init"} <= found.keys()
    missing = {
        f"{name}({argument.name})"
        for name, function in found.items()
        for argument in inspect.signature(function).parameters.values()
        if argument.annotation is argument.empty
        and argument.name != "self"
        and not name.partition(".")[2].startswith(OVERRIDES)
    }
    assert not missing


def test_the_package_is_marked():
    assert pathlib.Path(keras_norms.__file__).with_name("py.typed").exists()
