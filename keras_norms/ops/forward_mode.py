"""Forward mode, which hand-written gradients do not have."""

import keras

NO_FORWARD_MODE = (
    "A normalisation layer in training mode has no forward-mode derivative. Use "
    "reverse mode, and reverse mode twice for the product of a Hessian and a vector."
)


def have_tangents(tensors):
    """Whether forward mode is under way, on TensorFlow for one of them.

    For functions with custom gradients, and compiled ones, the results of a
    `tf.autodiff.ForwardAccumulator` would be wrong without an error.
    """
    if keras.backend.backend() == "torch":
        from torch.autograd import forward_ad

        return forward_ad._current_level >= 0  # There is no public name for it.
    import tensorflow as tf
    from tensorflow.python.eager import forwardprop_util

    return bool(forwardprop_util.pack_tangents(tf.nest.flatten(tensors)).tangents)
