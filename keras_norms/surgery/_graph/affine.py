"""Normalisation layers as what they are at inference: `a * x + b` for each channel."""

import string
from typing import NamedTuple

import keras
import numpy as np

from keras_norms import _keras
from keras_norms.layers.cbn import CBN
from keras_norms.layers.channel_affine import ChannelAffine
from keras_norms.layers.kernels import overrides_call
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.surgery._graph import linear

NORM_CLASSES = (keras.layers.BatchNormalization, CBN, NoisyBN, LpNorm)
# Of each sample alone.
OF_SAMPLES = (
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
)
_LARGEST_SHIFT = 1e18  # Its square fits into float32.


class Affine(NamedTuple):
    """The map x -> a * x + b; both are float64 vectors over the channels."""

    a: np.ndarray
    b: np.ndarray

    def after(self, first):
        """This map of what `first` gives."""
        return Affine(self.a * first.a, self.a * first.b + self.b)

    def is_scaled_shift(self, largest):
        """Where it is a * (x + b / a), with a shift of at most `largest`."""
        return (self.a != 0) & (np.abs(self.b) <= largest * np.abs(self.a))


def identity(channels):
    return Affine(np.ones(channels), np.zeros(channels))


def is_norm(unit):
    """Whether it is a norm that this package knows. A subclass may do anything."""
    return unit.cls in NORM_CLASSES


def is_batch_norm(unit):
    """Whether it is BatchNormalization, or of a class that computes the same."""
    is_derived = issubclass(unit.cls, keras.layers.BatchNormalization)
    return is_derived and not overrides_call(unit.cls)


def has_statistics(unit):
    """Whether it is a norm with moving statistics, and does what its class does."""
    return is_norm(unit) or is_batch_norm(unit)


def is_called_plainly(unit):
    """Whether no call has more than its input, or is always in training mode."""
    return all(node.input is not None and not node.always_trains for node in unit.nodes)


def axis_of(unit, rank):
    """The channel axis of a norm, or of a diagonal EinsumDense."""
    if issubclass(unit.cls, NORM_CLASSES):
        axis = unit.config["axis"]
        # Keras once stored a list.
        return int(np.ravel(axis)[0]) % rank
    return linear.diagonal_axis(unit, rank)


def affine_of(unit):
    """What a norm or a diagonal EinsumDense does at inference."""
    if not issubclass(unit.cls, NORM_CLASSES):
        kernel, bias = unit.weight("kernel"), unit.weight("bias")
        zero = np.zeros_like(kernel)
        return Affine(kernel, zero if bias is None else np.ravel(bias))
    mean = unit.weight("moving_mean")
    gamma, beta = unit.weight("gamma"), unit.weight("beta")
    beta = np.zeros_like(mean) if beta is None else beta
    a = (1.0 if gamma is None else gamma) / _divisor(unit, unit.weight)
    return Affine(a, a * (beta - mean) if _decouples(unit) else beta - a * mean)


def _divisor(unit, weight):
    """What a norm divides by at inference; `weight` gives its weights by name."""
    epsilon = unit.config["epsilon"]
    if unit.cls is CBN:
        return weight("rho") * np.sqrt(weight("moving_square") + epsilon)
    if unit.cls is LpNorm:
        return weight("moving_norm") + epsilon
    return np.sqrt(weight("moving_variance") + epsilon)


def _decouples(unit):
    """Whether it is a CBN that scales its shift too."""
    return unit.cls is CBN and unit.config["decouple"]


def become_channel_affine(unit, affine):
    """Turn a norm into a trainable scale and shift for each channel."""
    node = unit.nodes[0]
    rank = node.input.rank
    axis = axis_of(unit, rank)
    shapes = {each.input.shape for each in unit.nodes}
    # Where sizes differ from call to call, they are not known.
    shape = [sizes[0] if len({*sizes}) == 1 else None for sizes in zip(*shapes)]
    letters = string.ascii_lowercase[:rank]
    layer = ChannelAffine(
        f"{letters},{letters[axis]}->{letters}",
        output_shape=shape[1:],
        bias_axes=letters[axis],
        name=node.graph.free_name(f"{unit.name}_affine"),
        dtype=unit.config["dtype"],
        trainable=unit.config["trainable"],
    )
    bias = affine.b.reshape((-1,) + (1,) * (rank - 1 - axis))
    arrays = {"kernel": affine.a, "bias": bias}
    unit.become(ChannelAffine, layer.get_config(), arrays)


class Statistics(NamedTuple):
    """What is known of the input of a norm; `norm` is LpNorm's, where it was measured.

    `weight` is 0 where mean and variance only stand in for what is not known, `batches`
    says how many were measured.
    """

    mean: np.ndarray
    variance: np.ndarray
    norm: np.ndarray | None = None
    weight: float = 1.0
    batches: int = 0


def statistics_of(unit):
    """What the moving statistics of a norm say of its input."""
    mean, weight = unit.weight("moving_mean"), 1.0
    if unit.cls is CBN:
        variance = unit.weight("moving_square")
        beta = unit.weight("beta")
        if _decouples(unit) and beta is not None:
            variance = variance - np.square(beta)
        weight = float(unit.weight("average_weight"))
    elif unit.cls is LpNorm:
        variance = np.square(unit.weight("moving_norm"))
        if unit.config["norm_of"] != "centered":
            variance = variance - np.square(mean)
        weight = 0.0 if norm_is_guessed(unit) else 1.0
    else:
        variance = unit.weight("moving_variance")
    return Statistics(mean, np.maximum(variance, 0), weight=weight)


def unknown(channels):
    return Statistics(np.zeros(channels), np.ones(channels), weight=0.0)


def moving_statistics(cls, statistics, shift, epsilon):
    """The weights that hold the `Statistics` of the input of a norm, by name.

    Those of `renorm` too. `shift` is the beta that a CBN scales as well.
    """
    mean, variance, norm, weight, _ = statistics
    if issubclass(cls, CBN):
        square = variance + shift * shift
        return {"moving_mean": mean, "moving_square": square, "average_weight": weight}
    if issubclass(cls, LpNorm):
        return {"moving_mean": mean, "moving_norm": norm}
    deviation = (variance + epsilon) ** 0.5
    arrays = {"moving_mean": mean, "moving_variance": variance, "renorm_mean": mean}
    return arrays | {"moving_stddev": deviation, "renorm_stddev": deviation}


def weights_for(unit, affine, statistics):
    """Weights by name with which a norm is `affine` at inference, and whether it is.

    The moving statistics are `statistics`, so that a training batch of the same
    distribution sees the same map.

    CBN with `decouple=True` is a * (x - c), c = -b / a, and keeps mu and the mean
    square of x' = x - mu + beta. Hence beta = mu - c, sq = variance + beta^2, and
    gamma = a * rho * sqrt(sq + epsilon). The identity is beta = mu.
    """
    (a, b), config, mean = affine, unit.config, statistics.mean
    beta, shift = b + a * mean, 0.0
    if _decouples(unit):
        fits = affine.is_scaled_shift(_LARGEST_SHIFT)
        beta = shift = mean + np.divide(b, a, out=np.zeros_like(b), where=fits)
    if statistics.norm is None:
        # Right for p = 2; close to it otherwise, and gamma makes up for it.
        is_square = config.get("norm_of", "centered") != "centered"
        square = statistics.variance + (np.square(mean) if is_square else 0)
        statistics = statistics._replace(norm=np.sqrt(square))
    arrays = moving_statistics(unit.cls, statistics, shift, config["epsilon"])
    gamma = a * _divisor(unit, {**arrays, "rho": config.get("rho")}.get)
    met = (
        can_be(unit, affine)
        and (config["scale"] or np.allclose(gamma, 1, rtol=1e-6))
        and (config["center"] or np.allclose(beta, 0, atol=1e-7))
    )
    return {**arrays, "gamma": gamma, "beta": beta}, bool(met)


def can_be(unit, affine):
    """Whether a norm can be this map at all, gamma and beta given."""
    # Where CBN scales its shift too, a channel of scale 0 is 0.
    fits = affine.is_scaled_shift(_LARGEST_SHIFT) | (affine.b == 0)
    return not _decouples(unit) or bool(np.all(fits))


def norm_is_guessed(unit):
    """Whether it is an LpNorm whose statistic does not follow from the variance."""
    return unit.cls is LpNorm and float(unit.config["p"]) != 2


def is_on_another_axis(graph, unit):
    """Whether a call of `unit` is along another axis than that of the channels.

    The channel axis is the last one, or 1 in a model with `channels_first` layers.
    """
    units = filter(linear.is_linear, graph.all_units())
    first = "channels_first" in map(linear.data_format, units)
    return any(
        axis_of(unit, node.input.rank) not in (node.input.rank - 1, 1 if first else -1)
        for node in unit.nodes
    )


def hidden_norms(units):
    """Names of normalisation layers that cannot be seen or understood.

    They are inside layers other than models, or of classes that override `call`.
    """
    names = []
    for unit in units:
        if unit.layer is None or unit.graph is not None or is_norm(unit):
            continue
        if issubclass(unit.cls, NORM_CLASSES) and overrides_call(unit.cls):
            names.append(f"{unit.name} (of class {unit.cls.__name__})")
        inside = _keras.layers_of(unit.layer, NORM_CLASSES, include_self=False)
        names += [f"{norm.name} (in {unit.name})" for norm in inside]
    return names


def is_of_channels_of(norm, unit):
    """Whether a norm that reads a linear layer is on the axis of its channels."""
    ranks = [node.input.rank for node in norm.nodes]
    return all(axis_of(norm, n) == linear.channel_axis(unit, n) for n in ranks)


def norm_after(unit, predicate=is_norm):
    """The norm that alone reads a layer, and is called as often; or `None`."""
    if len(unit.readers) != 1 or not linear.has_linear_activation(unit):
        return None
    (norm,) = unit.readers
    fits = (
        predicate(norm)
        and all(node.output.is_private for node in unit.nodes)
        and len(norm.nodes) == len(unit.nodes)
    )
    return norm if fits else None
