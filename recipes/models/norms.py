"""Normalisations by name: which layer, and on which side of a linear layer it stands.

| name | what | where |
|---|---|---|
| none | nothing | |
| bn | keras BatchNormalization | after |
| cbn | CBN with AMAT | before |
| bn_before | BN as CBN's coupled form, batch statistics, rho | before |
| bn_rho, bn_rho_amat | the same, and that with AMAT | after |
| cbn_batch | CBN of batch statistics, without AMAT | before |
| cbn_fixed | CBN, in place of AMAT moving averages with eta = 0.9 | before |
| mean_removal, l2_norm | one half of CBN alone, with AMAT | before |
| noisy_bn | NoisyBN | after |
| lp1, lp2, lpinf | LpNorm | after |
| layer | one mean and variance a sample (GroupNormalization with 1 group) | after |
| group | GroupNormalization, 32 groups of at least 4 channels | after |
| rms | keras RMSNormalization, at each position | after |
| wn, cwn | WN, CWN with scale sqrt(2), which keeps the variance through ReLU | kernel |
| ws | WS. Outputs grow with the fan-in: it wants a norm after it | kernel |
| ws+gn, cwn+bn | WS and group, CWN and bn, as their papers use them | kernel, after |

"After" is between linear layer and activation, "before" between activation and linear
layer. Kernels are those of all convolutions. Another normalisation is one more entry of
`NORMS`, or a `Norm` of one's own given to a model.
"""

import dataclasses
import re
from collections.abc import Callable

import keras

from keras_norms import CBN, CWN, WN, WS, LpNorm, NoisyBN
from recipes.models.cbn_parts import L2Norm, MeanRemoval


@dataclasses.dataclass(frozen=True)
class Norm:
    """Factories of layers, and their place.

    Args:
        layer: Callable, `layer(channels, name=...)` returns a new layer.
        placement: `"after"` a linear layer and before the activation, `"before"` a
            linear layer and after the activation, or `None`: nowhere.
        wrapper: Callable, `wrapper(layer, name=...)` wraps a convolution.
        amat: Whether the `AMAT` callback is to tell its layers the learning rate.
    """

    layer: Callable | None = None
    placement: str | None = None
    wrapper: Callable | None = None
    amat: bool = False

    @property
    def use_bias(self):
        """Whether a linear layer needs its own bias, for no norm after it has one."""
        return self.placement != "after"

    def convolution(self, layer):
        """The convolution, with its kernel normalised if this norm does that."""
        return layer if self.wrapper is None else self.wrapper(layer, name=layer.name)

    def before(self, x, name):
        """The input of the linear layer `name`."""
        return self._apply(x, name) if self.placement == "before" else x

    def after(self, x, name):
        """The output of the linear layer `name`."""
        return self._apply(x, name) if self.placement == "after" else x

    def _apply(self, x, name):
        return self.layer(x.shape[-1], name=f"{name}_norm")(x)


def batch_normalization(channels, name):
    """BatchNormalization with PyTorch's defaults, as in the baselines of the paper."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


def noisy_batch_normalization(channels, name):
    # Seeded by `keras.utils.set_random_seed`, as initializers are.
    return NoisyBN(momentum=0.9, epsilon=1e-5, name=name)


def lp_norm(p):
    return lambda channels, name: LpNorm(p, momentum=0.9, name=name)


def group_normalization(channels, name):
    groups = max(n for n in range(1, 33) if channels % (4 * n) == 0 or n == 1)
    return keras.layers.GroupNormalization(groups, epsilon=1e-5, name=name)


def layer_normalization(channels, name):
    return keras.layers.GroupNormalization(1, epsilon=1e-5, name=name)


def rms_normalization(channels, name):
    return keras.layers.RMSNormalization(name=name)


def scaled_cwn(layer, name):
    return CWN(layer, scale=2**0.5, name=name)


def cbn(placement="before", kind=CBN, amat=True, **arguments):
    """Returns a function of rho and omega that makes the `Norm` of such layers.

    Its rho is a number, or a dict from a stage to its number and from None to that of
    all other stages.
    """

    def make(rho=1.0, omega=10.0):
        def layer(channels, name):
            own = rho
            if isinstance(rho, dict):
                own = rho.get(stage(name), rho[None])
            return kind(rho=own, omega=omega, name=name, **arguments)

        layer(1, "checked")  # refuses bad arguments now
        return Norm(layer, placement, amat=amat)

    return make


def without_amat(rate=-1.0, **arguments):
    """CBN told once and for all: by default that there is no learning rate."""
    layer = CBN(momentum=0.9, **arguments)
    layer.set_learning_rate(rate)
    return layer


def fixed_average(omega, **arguments):
    """CBN with eta = 0.9 whatever the learning rate of the optimizer is."""
    return without_amat(rate=0.1, omega=1.0, **arguments)


CBN_FAMILY = {
    "cbn": cbn(),
    "bn_before": cbn(kind=without_amat, amat=False, decouple=False),
    "bn_rho": cbn("after", without_amat, amat=False, decouple=False),
    "bn_rho_amat": cbn("after", decouple=False),
    "cbn_batch": cbn(kind=without_amat, amat=False),
    "cbn_fixed": cbn(kind=fixed_average, amat=False),
    "mean_removal": cbn(kind=MeanRemoval),
    "l2_norm": cbn(kind=L2Norm),
}

NORMS = {
    "none": Norm(),
    "bn": Norm(batch_normalization, "after"),
    **{name: make() for name, make in CBN_FAMILY.items()},
    "noisy_bn": Norm(noisy_batch_normalization, "after"),
    "lp1": Norm(lp_norm(1), "after"),
    "lp2": Norm(lp_norm(2), "after"),
    "lpinf": Norm(lp_norm("inf"), "after"),
    "layer": Norm(layer_normalization, "after"),
    "group": Norm(group_normalization, "after"),
    "rms": Norm(rms_normalization, "after"),
    "ws": Norm(wrapper=WS),
    "cwn": Norm(wrapper=scaled_cwn),
    "wn": Norm(wrapper=WN),
    "ws+gn": Norm(group_normalization, "after", WS),
    "cwn+bn": Norm(batch_normalization, "after", CWN),
}


def stage(name):
    """The stage of a network that a layer belongs to, by the name of the layer."""
    found = re.match(r"(stage|conv|block)\d+", name)
    return found[0] if found else name.split("_")[0]


def stage_rho(rho, text):
    """The rho of each stage, as `get` takes it.

    Args:
        rho: Float, of the stages that `text` does not name.
        text: Such as `"stage1=0.5,stage2=2"`, or `None`.
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
    """Raises a ValueError if `stage_rho` names a stage that the model has no CBN in."""
    layers = model._flatten_layers()
    stages = {stage(layer.name) for layer in layers if isinstance(layer, CBN)}
    named = stage_rho(1.0, text)
    if isinstance(named, dict) and named.keys() - stages - {None}:
        raise ValueError(
            f"Argument `stage_rho` must name stages with CBN layers: {sorted(stages)}. "
            f"Received: stage_rho={text!r}"
        )


def get(name, rho=1.0, omega=10.0):
    """Returns the `Norm` called `name`; `rho` and `omega` are those of CBN layers.

    `rho` may be that of each stage, see `stage_rho`.
    """
    if name not in NORMS:
        raise ValueError(
            f"Argument `norm` must be one of {sorted(NORMS)}. Received: norm={name!r}"
        )
    if name in CBN_FAMILY:
        return CBN_FAMILY[name](rho, omega)
    return NORMS[name]
