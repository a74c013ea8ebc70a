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
from tests.support.backend import some

FILES = sorted(golden.DIRECTORY.glob("*/*.keras"))
FIRST = [golden.DIRECTORY / f"0.1.0-{name}" for name in ("tensorflow", "jax", "torch")]
# Of each layer the file of one backend.
FEW = [FIRST[i % 3] / f"{name}.keras" for i, name in enumerate(golden.MODELS)]


def test_every_layer_has_files_of_every_backend():
    saved = set()
    for folder in FIRST:
        assert {path.stem for path in folder.glob("*.keras")} == {*golden.MODELS}
    for path in FILES:
        with zipfile.ZipFile(path) as file:
            config = file.read("config.json").decode()
            saved.update(re.findall(r'": "keras_norms>(\w+)"', config))
    registered = {
        name.removeprefix("keras_norms>")
        for name, value in keras.saving.get_custom_objects().items()
        if value.__module__.startswith("keras_norms.")
    }
    assert registered and registered <= saved


@pytest.mark.parametrize("path", some(FILES, FEW), ids=str)
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


def test_nothing_makes_code_out_of_files():
    root, count = pathlib.Path(__file__).parents[1], 0
    for package in ("keras_norms", "recipes", "tuner", "benchmarks"):
        for path in (root / package).rglob("*.py"):
            tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            names = {token.string for token in tokens}
            assert not FORBIDDEN & names, path
            count += "keras" in names
    assert count > 80
