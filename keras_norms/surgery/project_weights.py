"""ProjectWeights: scale-invariant kernels keep their norm, as points on a sphere."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import check_layers
from keras_norms.layers.kernels import kernels_by_name, kernels_of
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.ops.weight_norms import unit_norm
from keras_norms.surgery._graph import affine, linear
from keras_norms.surgery._graph.arrays import to_float64
from keras_norms.surgery._graph.blocks import graph_of

Logs = dict[str, float] | None


class ProjectWeights(keras.callbacks.Callback):
    """Puts kernels back to the norm they start with, after each step of training.

    What a normalisation makes does not depend on the scale of the kernel `W` before it.
    Steps make `|W|` grow (`diagnostics.WeightGrowth`), so that the rate at which the
    direction changes, `learning_rate / |W|^2`, falls by itself, and weight decay makes
    it rise. With

    ```
    W <- |W_0| W / |W|
    ```

    after each step the function is the same, and the rate is what its schedule says.
    The projection is a constraint of the variable, so that the optimizer does it in the
    compiled step, with `steps_per_execution` too. It is there while `fit` runs, and not
    in saved files; a `fit` that an exception ends leaves it there until the next one
    that has this callback ends. Weight decay of these kernels has next to no effect
    then.

    By default it takes the kernels that are scale-invariant by the layers around them:
    those of linear layers with a `BatchNormalization` or `NoisyBN` alone
    right behind them, or, where they have no bias, a `LayerNormalization`,
    `GroupNormalization`, `RMSNormalization` or `LpNorm` (one with `norm_of="centered"`
    also where they have); and those in `WS`, `CWN` and
    `WN`. Before a CBN with beta the scale matters, and before a frozen norm too.
    `diagnostics.weight_geometry` measures which are.

    Args:
        layers: Layers or their names, of which all trainable kernels are projected,
            those of layers inside too. `None`: see above.

    Attributes:
        norms: Dictionary from the path of each kernel to its norm, once training has
            begun.

    Raises:
        ValueError: When training begins, if a layer is not in the model or has no
            trainable kernel, if there is no such kernel, or if one has a constraint.

    Example:

    >>> growth = diagnostics.WeightGrowth()
    >>> model.fit(x, y, callbacks=[ProjectWeights(), growth])
    >>> growth.history["conv2d_norm"]  # stays

    Reference:

    - Sun et al., New Interpretations of Normalization Methods in Deep Learning, AAAI
      2020, Section 2.5 and Lemmas 2 and 3. https://doi.org/10.1609/aaai.v34i04.6046
    - Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models,
      CVPR 2024, Section 2.3. https://arxiv.org/abs/2312.02696. They normalise each unit
      of a kernel; here it is the kernel, on which the scale of units is the
      optimizer's.
    """

    def __init__(
        self, layers: Sequence[keras.layers.Layer | str] | None = None
    ) -> None:
        super().__init__()
        check_layers(layers)
        self._layers = layers
        self._kernels: list[keras.Variable] = []
        self.norms: dict[str, float] = {}

    def __deepcopy__(self, memo: Any) -> "ProjectWeights":
        # A copy belongs to no model yet.
        return type(self)(self._layers)

    def on_train_begin(self, logs: Logs = None) -> None:
        model = self.model
        if self._layers is None:
            kernels = scale_invariant_kernels(model)
        else:
            kernels = list(kernels_by_name(model, self._layers).values())
        kernels = [v for v in kernels if v.trainable]
        if not kernels:
            raise ValueError(
                "Argument `layers` must be given where no layer with a trainable "
                "kernel has a norm right behind it. "
                f"Received: layers=None with model '{model.name}'"
            )
        # A training that was interrupted has left its own.
        none = type(None), _OnSphere
        constrained = [v.path for v in kernels if not isinstance(v.constraint, none)]
        if constrained:
            raise arguments.wrong(
                "layers", "layers without a constraint of the kernel", constrained
            )
        self._kernels = kernels
        # Two kernels may have one path.
        norms = [float(np.linalg.norm(to_float64(v))) for v in kernels]
        self.norms = {v.path: norm for v, norm in zip(kernels, norms)}
        for variable, norm in zip(kernels, norms):
            variable.constraint = _OnSphere(norm)
        # The step that is compiled has no constraints in it.
        model.make_train_function(force=True)

    def on_train_end(self, logs: Logs = None) -> None:
        for variable in self._kernels:
            # Where the optimizer averages weights, it has put the averages there.
            variable.assign(variable.constraint(variable))
            variable.constraint = None
        self._kernels = []
        self.model.train_function = None


class _OnSphere(keras.constraints.Constraint):
    """Keeps the norm of a variable, unless it is 0."""

    def __init__(self, norm):
        self.norm = norm

    def __call__(self, w):
        w = ops.convert_to_tensor(w)
        direction = unit_norm(w, axes=tuple(range(len(w.shape))))
        return ops.cast(self.norm * direction, w.dtype)

    def get_config(self):
        return {"norm": self.norm}


def scale_invariant_kernels(model: keras.Model) -> list[keras.Variable]:
    """List the kernels of which the calls of a model say that they are."""
    graph = graph_of(model, "ProjectWeights", True)
    chosen = []
    for unit in filter(linear.is_linear, graph.all_units()):
        if issubclass(unit.cls, linear.WRAPPERS):
            chosen.append(unit.layer.layer)
        elif linear.is_foldable(unit) and affine.norm_after(
            unit, lambda norm, unit=unit: _makes_invariant(norm, unit)
        ):
            chosen.append(unit.layer)
    return [getattr(x, kernel.name) for x in chosen for kernel in kernels_of(x)]


def _makes_invariant(norm, unit):
    """Whether the output of a norm does not depend on the scale of what a layer adds.

    A mean of each channel that it takes out takes a bias of each channel out.
    """
    if norm.layer is None or norm.is_frozen:
        return False
    bias = unit.layer.bias
    if norm.cls in affine.OF_SAMPLES:
        return bias is None
    is_centered = norm.cls is LpNorm and norm.layer.norm_of == "centered"
    if affine.is_batch_norm(norm) or norm.cls is NoisyBN or is_centered:
        by_channel = bias is not None and len(bias.shape) == 1
        if by_channel and affine.is_of_channels_of(norm, unit):
            bias = None
    elif norm.cls is not LpNorm:
        return False
    return norm.layer.trainable and bias is None
