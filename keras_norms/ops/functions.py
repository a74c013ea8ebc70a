"""The functions that the maps are made of: `keras.ops`.

On PyTorch, what `keras.ops` does before it calls PyTorch (it looks for symbolic
tensors, converts arguments, promotes dtypes) takes several times as long as the work
for a vector. There PyTorch is called directly: with tensors, two of one dtype in a
call.
"""

from typing import Any

import keras

if keras.backend.backend() == "torch":
    from keras_norms.ops import torch_functions

    ops: Any = torch_functions
else:
    ops = keras.ops
