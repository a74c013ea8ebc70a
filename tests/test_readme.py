"""The example that README shows runs as it stands, and what it makes loads again."""

import pathlib
import re

import keras
import numpy as np

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_example(tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    rng = np.random.default_rng(0)
    names = {
        "x": rng.normal(size=(64, 28, 28, 1)).astype("float32"),
        "y": rng.integers(0, 10, 64),
    }
    exec(source, names)
    model, x = names["model"], names["x"]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
