"""Floating-point precision of networks, where Keras can compute in it."""

import contextlib

import keras


def available():
    """The dtypes. Except on TensorFlow, Keras operations turn float64 into float32."""
    wide = keras.backend.backend() == "tensorflow"
    return ("float32", "float64") if wide else ("float32",)


@contextlib.contextmanager
def precision(dtype):
    """Networks and losses made in this context compute in `dtype`."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float32" if dtype.startswith("mixed") else dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
