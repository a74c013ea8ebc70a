"""Checks of models, and of the batches, losses and layers given with them."""

from typing import Any

import keras
import numpy as np
from keras import tree

from keras_norms import _keras
from keras_norms._checks import arguments
from keras_norms._types import Data, LayerOrName, Layers, Loss


def check_model(model: object) -> None:
    """Raise ValueError unless it is a built model."""
    if not isinstance(model, keras.Model) or not model.built:
        raise ValueError(
            "Argument `model` must be a built keras.Model. To build one, call it on "
            f"data. Received: model={arguments.shown(model)}"
        )


def check_compiled_or_loss(model: keras.Model, loss: Loss) -> None:
    """Raise ValueError unless the model is built and compiled, or there is a loss."""
    check_model(model)
    check_loss(loss)
    if loss is None and not model.compiled:
        raise arguments.wrong("loss", "given if the model is not compiled", loss)


def check_loss(loss: Loss) -> None:
    """Raise ValueError unless it is `None`, or what `compile` takes as a loss."""
    parts = [part for part in tree.flatten(loss) if part is not None]
    if loss is not None and not (parts and all(map(_is_loss, parts))):
        raise arguments.wrong("loss", "a loss, its name, or several of them", loss)


def _is_loss(part):
    try:
        return callable(keras.losses.get(part) if isinstance(part, str) else part)
    except ValueError:
        return False


def check_inputs(model: keras.Model | None, x: Data, name: str = "x") -> None:
    """Raise ValueError unless `x` is a batch that fits the model, if there is one."""
    inputs = _inputs_of(model)
    text = any(keras.backend.standardize_dtype(i.dtype) == "string" for i in inputs)
    shapes = _shapes(tree.flatten(x), x, name, text)
    if any(0 in shape for shape in shapes):
        raise _wrong_shapes(name, "be a batch of at least one sample", shapes)
    if len({shape[0] for shape in shapes}) > 1:
        raise _wrong_shapes(name, "hold arrays of equally many samples", shapes)
    given, found = inputs, shapes
    if isinstance(x, dict):
        given = [i for i in inputs if i.name in x]
        found = [np.shape(x[i.name]) for i in given]
    fit = (_fits(shape[1:], i.shape[1:]) for shape, i in zip(found, given))
    if inputs and (len(found) != len(given) or not all(fit)):
        expected = f"have the shape of the inputs, {[tuple(i.shape) for i in inputs]}"
        raise _wrong_shapes(name, expected, shapes)


def check_batch(
    model: keras.Model | None, x: Data, y: Data, names: tuple[str, str] = ("x", "y")
) -> None:
    """Raise ValueError unless `x` fits the model, and `y` is `None` or fits `x`."""
    check_inputs(model, x, names[0])
    if y is None:
        return
    samples = np.shape(tree.flatten(x)[0])[0]
    parts = [part for part in tree.flatten(y) if part is not None]
    shapes = _shapes(parts, y, names[1])
    if any(shape[0] != samples for shape in shapes):
        expected = f"hold a target for each of the {samples} samples"
        raise _wrong_shapes(names[1], expected, shapes)


def check_pair(
    model: keras.Model | None, batch: Any, name: str, must: str = "hold pairs `(x, y)`"
) -> tuple[Any, Any]:
    """Return `batch` if it is a pair `(x, y)` that fits the model, if there is one."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"Argument `{name}` must {must}. Received: {arguments.shown(batch)}"
        )
    x, y = batch
    check_batch(model, x, y, (name, name))
    return x, y


def check_layers(layers: Layers | None) -> None:
    """Raise ValueError unless it is `None`, or a list of layers or of names."""
    if layers is None:
        return
    is_list = isinstance(layers, (list, tuple)) and len(layers) > 0
    if not is_list or not all(isinstance(e, (str, keras.layers.Layer)) for e in layers):
        raise arguments.wrong("layers", "a list of layers or of their names", layers)


def matching_layers(
    model: keras.Model, layer: LayerOrName, argument: str = "layers"
) -> list[keras.layers.Layer]:
    """List the layers of a model, nested ones too, that an argument means: one or more.

    A layer means itself; a name or path may mean several.
    """
    layers = _keras.layers_of(model, include_self=False)
    name = layer if isinstance(layer, str) else object()
    found = [e for e in layers if e is layer or name in (e.name, e.path)]
    if found:
        return found
    must = "hold layers" if argument == "layers" else "be a layer"
    raise ValueError(
        f"Argument `{argument}` must {must} of model '{model.name}', or their names. "
        f"Received: {argument}={arguments.shown(layer)}. "
        f"The model has {[each.name for each in layers]}"
    )


def _inputs_of(model):
    """The symbolic inputs; none where it is subclassed."""
    try:
        return list(model.inputs)
    except (AttributeError, TypeError, ValueError):
        return []


def _wrong_shapes(name, expected, shapes):
    return ValueError(
        f"Argument `{name}` must {expected}. Received: {name} of shape {shapes}"
    )


def _shapes(parts, batch, name, text=False):
    """The shapes of the arrays of a batch, which may hold text if a model reads it."""
    if not parts or not all(_is_array(part, text) for part in parts):
        raise arguments.wrong(name, "an array of numbers, or several of them", batch)
    return [tuple(np.shape(part)) for part in parts]


def _is_array(part, text):
    """Whether it has a first axis, and holds numbers."""
    if isinstance(part, keras.KerasTensor):  # which holds none
        return False
    if not (hasattr(part, "shape") and hasattr(part, "dtype")):
        try:
            part = np.asarray(part)
        except (TypeError, ValueError):
            return False
    return len(part.shape) > 0 and (text or arguments.is_numeric(part))


def _fits(shape, wanted):
    """Whether Keras takes a sample of that shape; one axis of size 1 may be missing."""
    if abs(len(shape) - len(wanted)) == 1:
        longer, shorter = sorted((shape, wanted), key=len, reverse=True)
        return longer[-1] == 1 and _fits(longer[:-1], shorter)
    return len(shape) == len(wanted) and all(
        None in sizes or len(set(sizes)) == 1 for sizes in zip(shape, wanted)
    )
