"""ProjectWeights: scale-invariant kernels keep their norm, as points on a sphere."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_norms._checks import arguments
from keras_norms._checks.models import check_layers
from keras_norms._types import Layers, Logs
from keras_norms.layers.kernels import kernels_by_name, kernels_of
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.ops.weight_norms import unit_norm
from keras_norms.surgery._graph import affine, linear
from keras_norms.surgery._graph.arrays import to_float64
from keras_norms.surgery._graph.blocks import graph_of


class ProjectWeights(keras.callbacks.Callback):
    """Keeps the norm of kernels constant, by scaling them after each training step.

    The output of a normalisation does not depend on the scale of the kernel `W` before
    it. Training steps make `|W|` grow (`diagnostics.WeightGrowth`). The rate at which
    its direction changes, `learning_rate / |W|^2`, then falls by itself; weight decay
    makes it rise. With

    ```
    W <- |W_0| W / |W|
    ```

    after each step the function is the same, and the rate follows its schedule. The
    projection is a constraint of the variable: the optimizer applies it in the compiled
    step, with `steps_per_execution` too. It is there while `fit` runs, and not in saved
    files. If an exception ends `fit`, it stays until the next `fit` with this callback
    ends. Weight decay of these kernels has next to no effect then.

    By default it takes the kernels that are scale-invariant because of the layers
    around them. These are the kernels in `WS`, `CWN` and `WN`, and those of linear
    layers whose output only a norm reads: `BatchNormalization`, `NoisyBN` or `LpNorm`
    with `norm_of="centered"`, or for layers without a bias also `LayerNormalization`,
    `GroupNormalization`, `RMSNormalization` or any `LpNorm`. Before a CBN with beta, or
    a frozen norm, the scale matters. `diagnostics.weight_geometry` measures which
    kernels are scale-invariant.

    Args:
        layers: Layers or their names. All their trainable kernels are projected, those
            of layers inside too. `None`: see above.

    Attributes:
        norms: Dictionary from the path of each kernel to its norm, after training has
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
      of a kernel, this the whole kernel: the optimizer sets the scales of its units.
    """

    def __init__(self, layers: Layers | None = None) -> None:
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
                "Argument `layers` must be given if no norm stands right after a layer "
                "with a trainable kernel. "
                f"Received: layers=None with model '{model.name}'"
            )
        # An interrupted training leaves its own.
        none = type(None), _OnSphere
        constrained = [v.path for v in kernels if not isinstance(v.constraint, none)]
        if constrained:
            raise arguments.wrong(
                "layers", "layers without a constraint on the kernel", constrained
            )
        self._kernels, self.norms = kernels, {}
        for variable in kernels:
            norm = float(np.linalg.norm(to_float64(variable)))
            self.norms[variable.path] = norm
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
    """List the kernels that are scale-invariant, by the calls of the model."""
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
    """Whether the scale of a layer's kernel does not change the output of a norm.

    A norm that removes the mean of each channel removes a bias of each channel too.
    """
    if norm.layer is None or norm.is_frozen or norm.config.get("renorm"):
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
