"""The data that `convert`, `recalibrate` and `prune` take, for `predict`."""

import keras
import numpy as np
from keras import tree

from keras_norms import _keras
from keras_norms._checks.models import check_inputs


def inputs_of(model, data):
    """What `predict` takes of data, or an error where the model does not take it."""
    if isinstance(data, (str, bytes, type, set)) or data is None or np.isscalar(data):
        raise wrong_data(data)
    inputs = _keras.inputs_of_graph(model)
    is_sequential = isinstance(model, keras.Sequential)
    one_input = is_sequential or inputs is None or len(tree.flatten(inputs)) == 1
    if isinstance(data, tuple) and len(data) in (2, 3):
        with_targets = one_input or isinstance(data[0], (list, tuple, dict))
        return _checked(model, data[0] if with_targets else list(data))
    is_array = hasattr(data, "shape") and hasattr(data, "dtype")
    if is_array or isinstance(data, dict):
        return _checked(model, data)
    if isinstance(data, keras.utils.PyDataset):
        return data
    if isinstance(data, (list, tuple)):
        if not data:
            raise wrong_data(data)
        if not one_input and all(hasattr(x, "shape") for x in data):
            return _checked(model, list(data))
        return _as_tuples([_checked(model, _inputs(batch)) for batch in data])
    known = ("tensorflow", "torch", "grain", "pandas")
    if any(c.__module__.partition(".")[0] in known for c in type(data).__mro__):
        return data
    if hasattr(data, "__iter__"):
        return _as_tuples(data)
    raise wrong_data(data)


def _checked(model, data):
    check_inputs(model, data, "data")
    return data


def _inputs(batch):
    return batch[0] if isinstance(batch, tuple) and batch else batch


def _as_tuples(batches):
    """Batches of inputs alone, in tuples: Keras takes no other generators."""
    for batch in batches:
        inputs = _inputs(batch)
        yield (tuple(inputs) if isinstance(inputs, list) else inputs,)


def wrong_data(data):
    return ValueError(
        "Argument `data` must be an array, a tf.data.Dataset, a PyDataset, a "
        "DataLoader or an iterable of batches, and not be empty. "
        f"Received: data of class {type(data).__name__}"
    )
