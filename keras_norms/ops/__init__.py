"""Pure functions on arrays: no layer, no state."""

from keras_norms.ops import backend as backend
