"""Arithmetic of vectors over channels for PyTorch on CUDA, in few kernels.

PyTorch starts operations one by one, which for a vector takes longer than the
arithmetic. Here one kernel does nearly everything between two passes over the
activations. `torch.cuda.jiterator` compiles it from C++ at first use, and keeps it on
disk. It takes and returns at most 8 tensors, so the division of the map by rho is
outside. Each function computes what the one of the same name in `normalize` does.
"""

import functools

import torch

from keras_norms.ops import normalize
from keras_norms.ops.backend.torch_cpu_vectors import is_plain

# For each channel. `found - found` is 0 where it is finite.
MAP = """
template <typename T>
void map_of_moments(T mean, T variance, T beta, T old_mean, T old_square, T old_weight,
                    T rate, T count, T& center, T& inverse, T& offset, T& square,
                    T& one, T& new_mean, T& new_square, T& new_weight) {{
    const bool decouple = {decouple}, known = rate >= T(0), seen = count > T(0);
    T step = T({omega!r}) * rate;
    step = step < T({smallest!r}) ? T({smallest!r}) : step > T(1) ? T(1) : step;
    step = known ? step : T({usual_step!r});
    const T weight = old_weight + step * (T(1) - old_weight);
    const T kept = seen ? (T(1) - step) * old_weight / weight : T(1);
    const T kept_here = known ? kept : T(!seen);
    const T ahead = kept_here * (mean - old_mean);
    const T shifted = ahead + beta;
    square = decouple ? variance + shifted * shifted : variance;
    const T used = square + kept_here * (old_square - square);
    center = decouple ? mean - shifted : mean - ahead;
    inverse = T(1) / sqrt(used + T({epsilon!r}));
    offset = decouple ? T(0) : beta;
    one = T(1);
    const T found = mean + square;
    const bool usable = seen && found - found == T(0);
    new_mean = usable ? mean + kept * (old_mean - mean) : old_mean;
    new_square = usable ? square + kept * (old_square - square) : old_square;
    new_weight = usable ? weight : old_weight;
}}
"""
GRADIENT = """
template <typename T>
void gradient_vectors(T sum_g, T sum_gx, T gamma, T inverse, T center, T mean, T square,
                      T count, T& scale, T& k, T& through_mean, T& dgamma, T& dbeta) {{
    const bool decouple = {decouple};
    const T divisor = count > T(1) ? count : T(1);
    scale = gamma * inverse;
    k = sum_gx / divisor / (square + T({epsilon!r}));
    const T mean_of_norm = decouple ? k * (mean - center) : T(0);
    through_mean = sum_g / divisor - mean_of_norm;
    dgamma = sum_gx * inverse;
    dbeta = decouple ? scale * (sum_g - mean_of_norm * divisor) : sum_g;
}}
"""


def source(template, settings):
    """The C++ of a kernel, with the static settings of the map."""
    return template.format(
        decouple=str(settings.decouple).lower(),
        omega=float(settings.omega),
        smallest=normalize.SMALLEST_STEP,
        usual_step=1 - settings.momentum,
        epsilon=float(settings.epsilon),
    )


@functools.cache
def compiled(template, outputs, settings):
    """A function of tensors that are scalars or have a value for each channel."""
    make = torch.cuda.jiterator._create_multi_output_jit_fn
    return make(source(template, settings), outputs)


def applies_to_map(batch, *others, settings):
    return batch.mean.is_cuda and is_plain(batch, settings)


def applies_to_gradient(local, total, gamma, batch_map, *, replicas, settings):
    return local.is_cuda and replicas == 1 and is_plain(batch_map, settings)


@normalize.map_of_moments.faster(where=applies_to_map)
def map_of_moments(batch, beta, state, rho, learning_rate, *, settings):
    center, inverse, offset, square, one, *averages, weight = compiled(
        MAP, 8, settings
    )(batch.mean, batch.variance, beta, *state, learning_rate, batch.count)
    batch_map = normalize.BatchMap(
        center, inverse.div_(rho), offset, batch.mean, square, one, batch.count
    )
    # It grows in any channel that was seen.
    return batch_map, normalize.CBNState(*averages, weight.amax())


@normalize.gradient_vectors.faster(where=applies_to_gradient)
def gradient_vectors(local, total, gamma, batch_map, *, replicas, settings):
    center, inverse, _, mean, square, _, count = batch_map
    scale, k, through_mean, dgamma, dbeta = compiled(GRADIENT, 5, settings)(
        local[0], local[1], gamma, inverse, center, mean, square, count
    )
    pivot = center if settings.decouple else mean
    return (scale, k, pivot, through_mean), dgamma, dbeta
