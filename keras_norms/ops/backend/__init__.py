"""Faster versions for single backends, registered with the functions they replace."""

import keras

if keras.backend.backend() == "tensorflow":
    from keras_norms.ops.backend import tensorflow_cpu as tensorflow_cpu
elif keras.backend.backend() == "jax":
    from keras_norms.ops.backend import jax_cpu as jax_cpu
elif keras.backend.backend() == "torch":
    from keras_norms.ops.backend import torch_cpu as torch_cpu
    from keras_norms.ops.backend import torch_cpu_groups as torch_cpu_groups
    from keras_norms.ops.backend import torch_cpu_vectors as torch_cpu_vectors
    from keras_norms.ops.backend import torch_cuda as torch_cuda
    from keras_norms.ops.backend import torch_cuda_vectors as torch_cuda_vectors
