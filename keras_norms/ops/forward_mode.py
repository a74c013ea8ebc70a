"""Forward mode, which hand-written gradients do not have."""

NO_FORWARD_MODE = (
    "A normalisation layer in training mode has no forward-mode derivative. Use "
    "reverse mode, and reverse mode twice for the product of a Hessian and a vector."
)


def have_tangents(tensors):
    """Whether a `tf.autodiff.ForwardAccumulator` follows one of them.

    For functions with custom gradients, and compiled ones, its results would be wrong
    without an error.
    """
    import tensorflow as tf
    from tensorflow.python.eager import forwardprop_util

    return bool(forwardprop_util.pack_tangents(tf.nest.flatten(tensors)).tangents)
