"""The functions that the maps consist of: `keras.ops`.

Before it calls PyTorch, `keras.ops` looks for symbolic tensors, converts arguments and
promotes dtypes, which takes several times as long as the work for a vector. On PyTorch
it is therefore called directly, with tensors, two of one dtype in a call.
"""

from typing import Any

import keras

if keras.backend.backend() == "torch":
    from keras_norms.ops import torch_functions

    ops: Any = torch_functions
else:
    ops = keras.ops
