"""All non-public parts of Keras that this package uses, in Keras 3.12 to 3.15.

One function for each need. Comments say where another version of Keras differs.
"""

import contextlib
from typing import Any, TypeVar, overload

import keras
from keras.src.backend import (
    AutocastScope,
    compute_output_spec,
    get_keras_mask,
    get_stateless_scope,
    in_symbolic_scope,
)
from keras.src.backend.common.masking import set_keras_mask
from keras.src.layers.input_spec import assert_input_compatibility
from keras.src.models.functional import Functional, functional_like_constructor
from keras.src.saving.serialization_lib import SafeModeScope
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.data_adapters import data_adapter_utils, get_data_adapter

# Used as they are.
__all__ = [
    "CompileLoss",
    "Functional",
    "assert_input_compatibility",
    "compute_output_spec",
    "functional_like_constructor",
    "get_keras_mask",
    "get_stateless_scope",
    "in_symbolic_scope",
    "set_keras_mask",
]


# Layers

Kind = TypeVar("Kind")


@overload
def layers_of(
    model: keras.layers.Layer, *, include_self: bool = True
) -> list[keras.layers.Layer]: ...
@overload
def layers_of(
    model: keras.layers.Layer, kind: type[Kind], include_self: bool = True
) -> list[Kind]: ...
@overload
def layers_of(
    model: keras.layers.Layer,
    kind: type[Any] | tuple[type[Any], ...],
    include_self: bool = True,
) -> list[Any]: ...
def layers_of(
    model: keras.layers.Layer,
    kind: type[Any] | tuple[type[Any], ...] = keras.layers.Layer,
    include_self: bool = True,
) -> list[Any]:
    """List the layers of a model: itself, and all layers in it, however deep.

    Args:
        model: A `keras.Model` or another layer.
        kind: A class, or a tuple of classes: only their instances are listed.
        include_self: Boolean, whether the model itself may be among them.

    Returns:
        List of layers, each once.
    """
    every = model._flatten_layers(include_self=include_self)
    return [layer for layer in every if isinstance(layer, kind)]


def layers_directly_in(layer: keras.layers.Layer) -> list:
    """List the layers that a layer holds itself, not those in them."""
    return list(layer._layers)


def own_weights(layer):
    """The trainable variables of a layer, without those of the layers in it."""
    return layer._trainable_variables


def without_autocast():
    """A scope in which variables keep their dtype in mixed precision."""
    return AutocastScope(None)


@contextlib.contextmanager
def unlocked(layer):
    """A scope in which a built layer may get more weights."""
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()


@contextlib.contextmanager
def keeping_losses(model):
    """A scope in which calls of the model do not change its losses."""
    kept = [(each, each._losses[:], set(each._loss_ids)) for each in layers_of(model)]
    try:
        yield
    finally:
        for layer, losses, ids in kept:
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


def clear_losses(model):
    """Forget the losses that calls of the model have added."""
    model._clear_losses()


@contextlib.contextmanager
def replaced(layer, **methods):
    """A scope in which a layer has other methods, such as `call`; scopes may nest."""
    own = {name: vars(layer)[name] for name in methods if name in vars(layer)}
    for name, method in methods.items():
        # Not through Keras, which would look for weights in the attribute.
        object.__setattr__(layer, name, method)
    try:
        yield
    finally:
        for name in methods:
            if name in own:
                object.__setattr__(layer, name, own[name])
            else:
                object.__delattr__(layer, name)


@contextlib.contextmanager
def running_once(layers):
    """A scope in which layers made in a `keras.RematScope` run only once.

    A second run, in the backward pass, would not see the `StatelessScope` of the first.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if layer._remat_mode is not None:
                own = {"rematerialized_call": lambda call, *args, **kwargs: call}
                stack.enter_context(replaced(layer, **own))
        yield


def takes_training(model):
    """Whether the `call` of a model has the argument `training`."""
    return model._call_has_training_arg


def shapes_built_for(model):
    """A list of the shapes of the inputs that a model was built for."""
    return list((model._build_shapes_dict or {}).values())


# Training


def compiled_loss(model):
    """What `compile` made of the loss, or `None`."""
    return getattr(model, "_compile_loss", None)


def unbuilt_loss(model):
    """What `compile` made of the loss, as it was before its first batch, or `None`."""
    loss = compiled_loss(model)
    if loss is None:
        return None
    given = loss._user_loss, loss._user_loss_weights
    unbuilt = CompileLoss(*given, output_names=loss.output_names)
    unbuilt._dtype = loss.dtype  # `keras.config.floatx()` may have changed since.
    return unbuilt


def compute_loss(model, x, y, predictions, training):
    """The loss of a compiled model with what its layers add, as `fit` computes it."""
    return model._compute_loss(x, y, predictions, None, training)


def compile_settings(model):
    """The arguments of `compile`, as they were given."""
    return model._compile_config.config


def unquantized(policy):
    """The dtype policy that a quantized one was made from."""
    if policy.quantization_mode is None:
        return policy
    compute, stored = policy.compute_dtype, policy.variable_dtype
    name = compute if compute == stored else f"mixed_{compute}"
    return keras.DTypePolicy(name)


def is_state_current(callback):
    """Whether variables have their values. In an epoch, JAX's trainer holds them."""
    # Not through `callback.model`, which fetches them.
    return getattr(callback._model, "_jax_state_synced", True)


def inner_optimizer(optimizer):
    """The optimizer that steps: `LossScaleOptimizer` wraps it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def exclude_from_weight_decay_as(old, new):
    """Exclude from weight decay what another model does: by variable path, by name.

    The configuration of an optimizer does not hold this.
    """
    theirs, ours = (inner_optimizer(model.optimizer) for model in (old, new))
    pattern = getattr(theirs, "_exclude_from_weight_decay_pattern", None)
    keys = getattr(theirs, "_exclude_from_weight_decay", ())
    paths = {v.path for v in old.variables if keys and theirs._var_key(v) in keys}
    if pattern or paths:
        variables = [v for v in new.variables if v.path in paths]
        names = [pattern.pattern] if pattern else None
        ours.exclude_from_weight_decay(variables, names)


def step_counter(optimizer):
    """The variable that counts the steps of an optimizer."""
    return inner_optimizer(optimizer)._iterations


def learning_rate_of(optimizer):
    """The learning rate of an optimizer: a variable or a schedule."""
    return inner_optimizer(optimizer)._learning_rate


def batches_of(data, batch_size):
    """An iterator of the inputs of each batch of what `fit` takes, as NumPy arrays.

    Raises:
        ValueError: If `fit` takes no such data.
    """
    try:
        adapter = get_data_adapter(data, batch_size=batch_size)
    except IndexError as error:  # Keras 3.12
        raise ValueError("There is no data.") from error
    unpack = data_adapter_utils.unpack_x_y_sample_weight
    return (unpack(batch)[0] for batch in adapter.get_numpy_iterator())


# Graphs of layers


def node_of(tensor):
    """The call that made a symbolic tensor."""
    operation, index, _ = tensor._keras_history
    return operation._inbound_nodes[index]


def functional_in(model):
    """The Functional model that a Sequential one has made, or `None`."""
    return model._functional


def number_of_inputs(model):
    """How many inputs a model has; 1 where that is not known, or it is `None`."""
    inputs = getattr(model, "_inputs_struct", None)  # of a Functional model
    if inputs is None and model is not None:
        inputs = [
            keras.tree.map_shape_structure(lambda shape: 0, each)
            for each in shapes_built_for(model)
        ]
    return len(keras.tree.flatten(inputs)) or 1


def structure_of(model):
    """The inputs of a Functional model, its calls in order, and its outputs."""
    by_depth = model._nodes_by_depth
    nodes = [
        node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]
    ]
    return model._inputs_struct, nodes, model._outputs_struct


def records_of(operation):
    """The lists in which an operation records calls: of itself, of its outputs."""
    return operation._inbound_nodes, operation._outbound_nodes


def forget_calls(operation):
    """Give an operation new, empty records of calls."""
    for name in ("_inbound_nodes", "_outbound_nodes"):
        object.__setattr__(operation, name, [])


# Files


def unsafe_deserialization():
    """A scope in which configurations may hold functions, as our own do."""
    return SafeModeScope(False)


# PyTorch


def torch_device():
    """Where Keras makes tensors."""
    from keras.src.backend.torch.core import get_device

    return get_device()
