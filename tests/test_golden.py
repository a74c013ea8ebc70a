"""Saved files of every version and backend load, and damaged ones say so."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_norms
from tests import golden

FILES = sorted(golden.DIRECTORY.glob("*/*.keras"))


def test_every_layer_has_files_of_every_backend():
    found = {(path.parent.name, path.stem) for path in FILES}
    for backend in ("tensorflow", "jax", "torch"):
        first = f"0.1.0-{backend}"
        assert {name for version, name in found if version == first} == {*golden.MODELS}
    saved = {
        type(layer).__name__
        for path in FILES
        for layer in keras.models.load_model(path).layers
    }
    public = [getattr(keras_norms, name) for name in keras_norms.__all__]
    public = {c.__name__ for c in public if isinstance(c, type)}
    assert public - {"AMAT"} <= saved


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_outputs_are_those_of_the_version_that_wrote_the_file(path):
    model = keras.models.load_model(path)
    with np.load(path.with_suffix(".npz")) as file:
        recorded = dict(file)
    x = recorded.pop("x")
    found = golden.outputs(model, x)
    assert found.keys() == recorded.keys()
    for mode, values in recorded.items():
        np.testing.assert_allclose(found[mode], values, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The path of a file, not yet there, that a test may damage."""
    return tmp_path_factory.mktemp("damaged") / "model.keras"


@settings(deadline=None, max_examples=20)
@given(st.floats(0, 1, exclude_max=True))
def test_file_cut_short(copy, share):
    content = FILES[0].read_bytes()
    copy.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="accessible `.keras` zip file"):
        keras.models.load_model(copy)


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_flipped_bit_is_an_error_or_without_effect(copy, share, bit):
    content = bytearray(FILES[0].read_bytes())
    content[int(share * len(content))] ^= 1 << bit
    copy.write_bytes(content)
    try:
        model = keras.models.load_model(copy)
    except Exception as error:  # of zipfile's many kinds; most are a wrong checksum
        assert str(error)
        return
    with np.load(FILES[0].with_suffix(".npz")) as file:
        found = golden.outputs(model, file["x"])["inference"]
        np.testing.assert_allclose(found, file["inference"], rtol=2e-5, atol=2e-6)
