"""Types that public signatures share."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

# A tensor of the backend, or what `keras.ops` converts to one.
Tensor: TypeAlias = Any
# Sizes of axes, `None` where one is not known.
Shape: TypeAlias = Sequence[int | None]
# What `keras.initializers.get` takes, and so on.
Initializer: TypeAlias = Any
Regularizer: TypeAlias = Any
Constraint: TypeAlias = Any
# Arrays, or a structure of them, as `fit` takes them.
Data: TypeAlias = Any
# What `compile` takes as `loss`.
Loss: TypeAlias = Any
# A layer of a model, or its name.
LayerOrName: TypeAlias = keras.layers.Layer | str
Layers: TypeAlias = Sequence[LayerOrName]
# A batch `(x, y)`; that, or a function of the step that returns one.
Batch: TypeAlias = tuple[Data, Data] | list[Data]
BatchOrFunction: TypeAlias = Batch | Callable[[int], Batch]
# What Keras hands to callbacks.
Logs: TypeAlias = dict[str, Any] | None
Directory: TypeAlias = str | os.PathLike[str]
