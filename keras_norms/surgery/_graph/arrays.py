"""Arrays of any backend to NumPy, and NumPy arrays to variables."""

import numpy as np
from keras import ops


def to_numpy(x):
    """An array or variable of any backend as a NumPy array."""
    return ops.convert_to_numpy(ops.convert_to_tensor(x))


def to_float64(x):
    return np.asarray(to_numpy(x), "float64")


def assign(variable, array):
    """Give a variable the values of an array of any dtype."""
    variable.assign(ops.cast(np.asarray(array), variable.dtype))


def assign_all(layer, arrays):
    """Give the weights of a layer the values of arrays, by name."""
    for variable in layer.weights:
        if variable.name in arrays:
            assign(variable, arrays[variable.name])
