"""Saved files of every version and backend load, and damaged ones say so."""

import io
import pathlib
import re
import shutil
import tokenize
import zipfile

import keras
import numpy as np
import pytest

from tests.programs import damaged, golden

FILES = sorted(golden.DIRECTORY.glob("*/*.keras"))
BACKENDS = ("tensorflow", "jax", "torch")
# Of each layer the file of one backend.
FEW = {(f"0.1.0-{BACKENDS[i % 3]}", name) for i, name in enumerate(golden.MODELS)}


def test_every_layer_has_files_of_every_backend():
    found = {(path.parent.name, path.stem) for path in FILES}
    for backend in BACKENDS:
        first = f"0.1.0-{backend}"
        assert {name for version, name in found if version == first} == {*golden.MODELS}
    saved = set()
    for path in FILES:
        with zipfile.ZipFile(path) as file:
            config = file.read("config.json").decode()
            saved.update(re.findall(r'"class_name": "(\w+)"', config))
    registered = keras.saving.get_custom_objects()
    package, prefix = "keras_norms.", "keras_norms>"
    registered = {
        name.removeprefix(prefix)
        for name, value in registered.items()
        if name.startswith(prefix) and value.__module__.startswith(package)
    }
    assert registered and registered <= saved


def case_of(path):
    version, name = path.parent.name, path.stem
    marks = () if (version, name) in FEW else pytest.mark.thorough
    return pytest.param(path, marks=marks, id=f"{version}-{name}")


@pytest.mark.parametrize("path", [*map(case_of, FILES)])
def test_outputs_are_those_of_the_version_that_wrote_the_file(path):
    model = keras.models.load_model(path)
    with np.load(path.with_suffix(".npz")) as file:
        recorded = dict(file)
    x = recorded.pop("x")
    found = golden.outputs(model, x)
    assert found.keys() == recorded.keys()
    for mode, values in recorded.items():
        np.testing.assert_allclose(found[mode], values, rtol=2e-5, atol=2e-6)


def test_damage_is_an_error_or_without_effect(tmp_path):
    """A flipped bit here and there, and a file that ends there."""
    path = pathlib.Path(shutil.copy(damaged.MODEL, tmp_path / "model.keras"))
    step = 1 + path.stat().st_size // 25
    found = damaged.count(path, lambda: damaged.model_state(tmp_path), step, bits=[0])
    assert found["errors"] > 0.5 * found.total() and not found["changed"]


# What makes code out of what stands in a file.
FORBIDDEN = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
FORBIDDEN |= {"eval", "exec", "__import__", "allow_pickle", "safe_mode", "Lambda"}
FORBIDDEN |= {"enable_unsafe_deserialization"}


def forbidden_in(source):
    """The names in a module's source by which a file could become code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return FORBIDDEN & {token.string for token in tokens}


def test_nothing_makes_code_out_of_files():
    root = pathlib.Path(__file__).parents[1]
    paths = [
        path
        for package in ("keras_norms", "recipes", "tuner", "benchmarks")
        for path in (root / package).rglob("*.py")
    ]
    assert len(paths) > 80
    found = {str(path): forbidden_in(path.read_text()) for path in paths}
    assert not {path: names for path, names in found.items() if names}
    assert forbidden_in("keras.models.load_model(path, safe_mode=False)")
