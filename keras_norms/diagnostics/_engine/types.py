"""Types that public signatures of diagnostics share."""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

# Arrays, or a structure of them, as `fit` takes them.
Data: TypeAlias = Any
# What `compile` takes as `loss`.
Loss: TypeAlias = Any
# A layer of a model, or its name.
LayerOrName: TypeAlias = keras.layers.Layer | str
Layers: TypeAlias = Sequence[LayerOrName]
# A batch `(x, y)`, and one or a function of the step that returns one.
Batch: TypeAlias = tuple[Data, Data]
BatchOrFunction: TypeAlias = Batch | Callable[[int], Batch]
Directory: TypeAlias = str | os.PathLike[str]
