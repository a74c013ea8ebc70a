"""Normalisations by name: which layer, and on which side of a linear layer it stands.

| name | what | where |
|---|---|---|
| none | nothing | |
| bn | keras BatchNormalization | after |
| cbn | CBN with AMAT | before |
| cbn_no_se | the same, but not inside squeeze-and-excitation | before |
| bn_before | BN as CBN's coupled form, batch statistics, rho | before |
| bn_rho, bn_rho_amat | the same, and that with AMAT | after |
| cbn_batch | CBN of batch statistics, without AMAT | before |
| cbn_fixed | CBN, in place of AMAT moving averages with eta = 0.9 | before |
| mean_removal, l2_norm | one half of CBN alone, with AMAT | before |
| noisy_bn | NoisyBN | after |
| noise | the noise of NoisyBN alone, at inference as well | after |
| lp1, lp2, lpinf | LpNorm | after |
| layer | one mean and variance a sample (GroupNormalization with 1 group) | after |
| group | GroupNormalization, 32 groups of at least 4 channels | after |
| instance | one mean and variance a sample and channel | after |
| rms | keras RMSNormalization, at each position | after |
| renorm | keras BatchNormalization(renorm=True), which Keras 3.12 lacks | after |
| dyt, derf | gamma tanh(alpha x) + beta; gamma erf(alpha x + s) + beta | after |
| wn, cwn | WN, CWN with scale sqrt(2), which its paper takes for ReLU | kernel |
| ws | WS. Outputs grow with the fan-in: it wants a norm after it | kernel |
| sn | keras SpectralNormalization | kernel |
| ws+gn, cwn+bn | WS and group, CWN and bn, as their papers use them | kernel, after |

"After" is between linear layer and activation, "before" between activation and linear
layer. Kernels are those of all convolutions. To use another normalisation, add an entry
to `NORMS`, or pass your own `Norm` to a model.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial

import keras

from keras_norms import CBN, CWN, WN, WS, LpNorm, NoisyBN
from keras_norms.layers import layers_of
from recipes.models.cbn_parts import L2Norm, MeanRemoval
from recipes.models.pointwise import DynamicErf, DynamicTanh


@dataclasses.dataclass(frozen=True)
class Norm:
    """Factories of layers, and their place.

    Args:
        layer: Callable, `layer(channels, name=...)` returns a new layer.
        placement: `"after"` a linear layer and before the activation, `"before"` a
            linear layer and after the activation, or `None`: nowhere.
        wrapper: Callable, `wrapper(layer, name=...)` wraps a convolution.
        amat: Whether its layers get the learning rate from the `AMAT` callback.
        skip: Layers without this norm, as `convert`'s argument.
    """

    layer: Callable | None = None
    placement: str | None = None
    wrapper: Callable | None = None
    amat: bool = False
    skip: Callable | None = None

    @property
    def use_bias(self):
        """Whether a linear layer needs its own bias: no norm after it has one."""
        return self.placement != "after"

    def convolution(self, layer):
        """The convolution, with a normalised kernel if this norm has that."""
        return layer if self.wrapper is None else self.wrapper(layer, name=layer.name)

    def before(self, x, name):
        """The input of the linear layer `name`."""
        return self._apply(x, name) if self.placement == "before" else x

    def after(self, x, name):
        """The output of the linear layer `name`."""
        return self._apply(x, name) if self.placement == "after" else x

    def _apply(self, x, name):
        return self.layer(x.shape[-1], name=f"{name}_norm")(x)


def group_normalization(channels, name):
    groups = max(n for n in range(1, 33) if channels % (4 * n) == 0 or n == 1)
    return keras.layers.GroupNormalization(groups, epsilon=1e-5, name=name)


def after(kind, wrapper=None, **arguments):
    """A `Norm` after linear layers, whose layers need no number of channels."""
    return Norm(lambda channels, name: kind(**arguments, name=name), "after", wrapper)


def cbn(
    rho=1.0,
    omega=10.0,
    placement="before",
    kind=CBN,
    amat=True,
    skip=None,
    **arguments,
):
    """A `Norm` of CBN layers. `rho` is a number, or what `stage_rho` returns."""

    def layer(channels, name):
        own = rho.get(stage(name), rho[None]) if isinstance(rho, dict) else rho
        return kind(rho=own, omega=omega, name=name, **arguments)

    return Norm(layer, placement, amat=amat, skip=skip)


def in_squeeze_and_excitation(layer):
    """Whether a layer of a network of keras.applications is inside that."""
    return "_se_" in layer.name


def without_amat(rate=-1.0, **arguments):
    """CBN with a fixed learning rate, by default none."""
    layer = CBN(momentum=0.9, **arguments)
    layer.set_learning_rate(rate)
    return layer


def fixed_average(omega, **arguments):
    """CBN with eta = 0.9, whatever the optimizer's learning rate."""
    return without_amat(rate=0.1, omega=1.0, **arguments)


cbn_batch = partial(cbn, kind=without_amat, amat=False)
CBN_FAMILY = {
    "cbn": cbn,
    "cbn_no_se": partial(cbn, skip=in_squeeze_and_excitation),
    "bn_before": partial(cbn_batch, decouple=False),
    "bn_rho": partial(cbn_batch, placement="after", decouple=False),
    "bn_rho_amat": partial(cbn, placement="after", decouple=False),
    "cbn_batch": cbn_batch,
    "cbn_fixed": partial(cbn_batch, kind=fixed_average),
    "mean_removal": partial(cbn, kind=MeanRemoval),
    "l2_norm": partial(cbn, kind=L2Norm),
}
BN = keras.layers.BatchNormalization
PYTORCH = {"momentum": 0.9, "epsilon": 1e-5}  # as in the baselines of the CBN paper
# The last bounds and the averages of Batch Renormalization (arXiv 1702.03275, Section
# 4.1), without their warm-up, which Keras lacks.
RENORM = {"renorm_clipping": {"rmin": 1 / 3, "rmax": 3.0, "dmax": 5.0}}
RENORM |= {"renorm": True, "momentum": 0.99, "epsilon": 1e-5}
# The statistics stay at mean 0 and variance 1.
FROZEN = {"trainable": False, "center": False, "scale": False, "epsilon": 1e-7}
NORMS = {
    "none": Norm(),
    "bn": after(BN, **PYTORCH),
    **{name: make() for name, make in CBN_FAMILY.items()},
    # Seeded by `keras.utils.set_random_seed`, like initializers.
    "noisy_bn": after(NoisyBN, **PYTORCH),
    "noise": after(NoisyBN, noise_at_inference=True, **FROZEN),
    **{f"lp{p}": after(LpNorm, p=p, momentum=0.9) for p in (1, 2, "inf")},
    "layer": after(keras.layers.GroupNormalization, groups=1, epsilon=1e-5),
    "group": Norm(group_normalization, "after"),
    "instance": after(keras.layers.GroupNormalization, groups=-1, epsilon=1e-5),
    "rms": after(keras.layers.RMSNormalization),
    "renorm": after(BN, **RENORM),
    "dyt": after(DynamicTanh),
    "derf": after(DynamicErf),
    "ws": Norm(wrapper=WS),
    "cwn": Norm(wrapper=partial(CWN, scale=2**0.5)),
    "wn": Norm(wrapper=WN),
    "sn": Norm(wrapper=keras.layers.SpectralNormalization),
    "ws+gn": Norm(group_normalization, "after", WS),
    "cwn+bn": after(BN, CWN, **PYTORCH),
}


def stage(name):
    """The stage of a network that a layer belongs to, by the name of the layer."""
    found = re.match(r"(stage|conv|block)\d+", name)
    return found[0] if found else name.split("_")[0]


def stage_rho(rho, text):
    """The rho of each stage, from text like `"stage1=0.5,stage2=2"` or `None`.

    Either `rho` itself, or a dict from a stage to its rho and from `None` to `rho`, for
    all other stages.
    """
    if text is None:
        return rho
    rho_of = {None: rho}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            rho_of[name] = float(value)
        except ValueError:
            rho_of[name] = 0.0
        if not (name and rho_of[name] > 0):
            raise ValueError(
                "Argument `stage_rho` must be like 'stage1=0.5,stage2=2', of positive "
                f"numbers. Received: stage_rho={text!r}"
            )
    return rho_of


def check_stages(text, model):
    """Raises a ValueError if `stage_rho` names a stage without CBN in the model."""
    stages = {stage(layer.name) for layer in layers_of(model, CBN)}
    named = stage_rho(1.0, text)
    if isinstance(named, dict) and named.keys() - stages - {None}:
        raise ValueError(
            f"Argument `stage_rho` must name stages with CBN layers: {sorted(stages)}. "
            f"Received: stage_rho={text!r}"
        )


def get(name, rho=1.0, omega=10.0):
    """The `Norm` called `name`; CBN layers have `rho` (see `stage_rho`) and `omega`."""
    if name not in NORMS:
        raise ValueError(
            f"Argument `norm` must be one of {sorted(NORMS)}. Received: norm={name!r}"
        )
    return CBN_FAMILY[name](rho, omega) if name in CBN_FAMILY else NORMS[name]


def unused(name):
    """Those of the settings rho, stage_rho and omega that the norm does not use."""
    rhos = () if name in CBN_FAMILY else ("rho", "stage_rho")
    return (*rhos, *(() if get(name).amat else ("omega",)))
