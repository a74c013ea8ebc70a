"""What works on a backend of Keras that has no gradients, such as NumPy: inference.

KERAS_BACKEND=numpy python -m tests.programs.inference
"""

import keras
import numpy as np
from keras.layers import Dense

from keras_norms import CBN, WS, FusedCBN, LpNorm, NoisyBN, fold


def check(norm):
    """Outputs are finite, folded ones the same; all but WS refuse `training=True`."""
    x = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), Dense(4), norm, Dense(2)])
    expected = model.predict(x, verbose=0)
    assert np.isfinite(expected).all()
    folded = fold(model).predict(x, verbose=0)
    np.testing.assert_allclose(folded, expected, rtol=1e-5, atol=1e-6)
    if isinstance(norm, WS):
        return
    try:
        norm(x, training=True)
    except ValueError as error:
        assert "trains on tensorflow, jax, torch only" in str(error), error
        assert f"KERAS_BACKEND={keras.backend.backend()}" in str(error), error
    else:
        raise AssertionError(f"{norm} was trained")


if __name__ == "__main__":
    for norm in CBN(), NoisyBN(), LpNorm(), FusedCBN(Dense(3)), WS(Dense(3)):
        check(norm)
    print("works")
