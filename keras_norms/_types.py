"""Types that public signatures share."""

from collections.abc import Sequence
from typing import Any, TypeAlias

# A tensor of the backend, or what `keras.ops` makes one of.
Tensor: TypeAlias = Any
# Sizes of axes, `None` where one is not known.
Shape: TypeAlias = Sequence[int | None]
# What `keras.initializers.get` takes, and so on.
Initializer: TypeAlias = Any
Regularizer: TypeAlias = Any
Constraint: TypeAlias = Any
