"""fold: a copy for inference, with the normalisation in kernels and biases."""

import keras
import numpy as np

from keras_norms.layers.channel_affine import ChannelAffine
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph import linear, moves
from keras_norms.surgery._graph.arrays import to_float64
from keras_norms.surgery._graph.blocks import NORMALIZING, graph_of, warn_of_layers
from keras_norms.surgery._graph.fused_cbn import split_fused_cbn
from keras_norms.surgery._graph.relu import take_relu_of_keras
from keras_norms.surgery._graph.remake import config_of


def fold(model: keras.Model, inline: bool = True) -> keras.Model:
    """Make a copy for inference, with normalisation folded into kernels and biases.

    At inference every normalisation layer is a map `a * x + b` of each channel. After a
    linear layer that nothing else reads, the map goes into the kernel and bias of that
    layer. Before linear layers, it goes into theirs. It passes Dropout, pooling,
    cropping, upsampling, Flatten and Concatenate where it commutes with them. This is
    computed in float64. WS, CWN and WN become the layer inside them, with the
    normalised kernel.

    The result has only Keras layers and loads where keras_norms is not installed. Its
    outputs are those of `model` at inference, also at image borders. In two cases a
    layer of the same name replaces the normalisation:

    * Before a zero-padded convolution `b` cannot go into the bias, because the zeros at
      the border are added after the map. The scale goes into the kernel, and the shift
      `x + b / a` stays, as one `Rescaling` layer before the padding.
    * A map that no linear layer can take, such as one between a sum and an activation,
      stays as one frozen `BatchNormalization`. A warning names these.

    Before int8, `prune` constant channels: their scale, up to
    `gamma / (rho * sqrt(epsilon))`, uses up the range of the kernel that reads them.

    Blocks and subclassed models are entered as in `convert`. Blocks that cannot be
    traced stay, with a warning.

    Args:
        model: A built Functional, Sequential or subclassed model, nested or with shared
            layers. It is not changed. Layers inside layers of Keras, such as
            `TimeDistributed(BatchNormalization())`, stay as they are.
        inline: Boolean, whether blocks are entered. If not, their layers stay, and
            subclassed models are refused.

    Returns:
        A new model of the same name, compiled in the same way. Its other layers keep
        their names and dtype policies. Do not train it: BatchNormalization is gone.

    Raises:
        ValueError: If the model is not built, if it is subclassed and cannot be traced,
            if a layer is not affine at inference, or if a layer with weights cannot be
            rebuilt from its configuration.

    Example:

    >>> fold(model).export("saved_model")
    """
    graph = graph_of(model, "fold", inline, holding=NORMALIZING)
    split_fused_cbn(graph)
    for unit in graph.all_units():
        if issubclass(unit.cls, linear.WRAPPERS):
            _unwrap(unit)
    masked = any(each.has_masks for each in graph.walk())
    units = graph.all_units()
    found = [unit for unit in units if _is_map(graph, unit, masked)]
    maps = {unit: affine_lib.affine_of(unit) for unit in found}
    rests = _fold_all(maps)
    given_masks = [
        unit
        for unit in units
        if affine_lib.has_statistics(unit) and unit not in maps | rests and unit.nodes
    ]
    left = [unit.name for unit in (*maps, *given_masks)]
    others = [unit for unit in given_masks if not affine_lib.is_batch_norm(unit)]
    maps |= {unit: affine_lib.affine_of(unit) for unit in others}
    shifts = {unit for unit, affine in rests.items() if np.all(affine.a == 1)}
    for unit, affine in (maps | rests).items():
        _become_layer_of_keras(unit, affine, is_shift=unit in shifts)
    parts = {
        "These stay as BatchNormalization layers: {}. No linear layer can take their "
        "scale and shift, or they have an explicit mask or training=True.": left,
        "These stay as they are: {}. They are inside other layers, or of a class "
        "that overrides `call`.": sorted(affine_lib.hidden_norms(units)),
    }
    warn_of_layers("fold", parts)
    take_relu_of_keras(units)
    return graph.make()


def _is_map(graph, unit, masked):
    if not affine_lib.has_statistics(unit):
        # An EinsumDense may also scale time steps, and it drops masks. Norms do not.
        drops = masked and unit.cls is not ChannelAffine
        if drops or linear.diagonal_axis(unit, 2) is None:
            return False
        return not affine_lib.is_on_another_axis(graph, unit)
    if any(node.always_trains for node in unit.nodes):
        if affine_lib.is_batch_norm(unit):
            return False
        raise ValueError(
            f"Layer '{unit.name}' cannot be folded: the model calls it with "
            "training=True."
        )
    if unit.cls is NoisyBN and unit.config["noise_at_inference"]:
        raise ValueError(
            f"Layer '{unit.name}' cannot be folded: it adds noise at inference. Set "
            "noise_at_inference=False."
        )
    return all(node.input is not None for node in unit.nodes)


def _fold_all(maps):
    """Fold what can be folded. Returns what is left of maps whose scale was folded."""
    rests, before = {}, None
    while len(maps) != before:
        before = len(maps)
        # Backward first: it is exact at borders whatever the padding.
        for move in (moves.fold_backward, moves.fold_forward):
            for unit in list(maps):
                if unit in maps:
                    move(unit, maps)
    for unit in list(maps):
        if unit in maps:
            rests |= moves.fold_scale_forward(unit, maps)
    return rests


def _unwrap(unit):
    """Replace a wrapper by its layer, with the kernel that it is called with."""
    wrapper, layer = unit.layer, unit.layer.layer
    weights = {v.name: v for v in layer.weights} | wrapper.normalized_kernels()
    arrays = {name: to_float64(weight) for name, weight in weights.items()}
    unit.become(type(layer), {**config_of(layer), "name": wrapper.name}, arrays)


def _become_layer_of_keras(unit, affine, is_shift):
    """Turn a map into a layer of Keras."""
    rank = unit.nodes[0].inputs[0].rank
    axis = affine_lib.axis_of(unit, rank)
    common = {"name": unit.name, "dtype": unit.config["dtype"]}
    if is_shift:
        double = keras.dtype_policies.get(common["dtype"]).compute_dtype == "float64"
        offset = affine.b.astype("float64" if double else "float32")
        offset = offset.reshape((-1,) + (1,) * (rank - 1 - axis))
        offset = keras.saving.serialize_keras_object(offset)
        config = {**common, "scale": 1.0, "offset": offset}
        unit.become(keras.layers.Rescaling, config, {})
        return
    config = {**common, "axis": axis, "epsilon": 0.0, "trainable": False}
    # It starts with the mean 0 and variance 1 that it needs.
    arrays = {"gamma": affine.a, "beta": affine.b}
    unit.become(keras.layers.BatchNormalization, config, arrays)
