"""Pure functions, tensors in and tensors out: no layer, no state."""

from keras_norms.ops import (
    backend,
    linear_of_affine,
    lp_norm,
    moments,
    noise,
    normalize,
    weight_norms,
)

__all__ = [
    "backend",
    "linear_of_affine",
    "lp_norm",
    "moments",
    "noise",
    "normalize",
    "weight_norms",
]
