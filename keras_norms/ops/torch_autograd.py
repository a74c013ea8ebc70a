"""PyTorch functions whose gradient is given: `apply(forward, gradient, *tensors)`."""

import torch

from keras_norms.ops.forward_mode import NO_FORWARD_MODE


class Eager(torch.autograd.Function):
    """Without `setup_context`, for which PyTorch binds arguments in each call."""

    @staticmethod
    def forward(ctx, forward, gradient, *tensors):
        Anywhere.setup_context(ctx, (forward, gradient, *tensors), None)
        return forward(*tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(NO_FORWARD_MODE)

    @staticmethod
    def backward(ctx, *upstreams):
        if all(upstream is None for upstream in upstreams):
            return (None,) * len(ctx.needs_input_grad)
        return None, None, *ctx.gradient(upstreams, ctx.saved_tensors)


class Anywhere(Eager):
    """The same, slower, also where PyTorch compiles or maps (`torch.func`)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(forward, gradient, *tensors):
        return forward(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.gradient, *tensors = inputs
        # Not in a closure: double backward must find the way to what made them.
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
