"""Normalisations by name: which layer, and on which side of a linear layer it stands.

Another one is one more line in `NORMS`, or a `Norm` of one's own given to a model.
"""

import dataclasses
from collections.abc import Callable

import keras

from keras_norms import CBN


@dataclasses.dataclass(frozen=True)
class Norm:
    """A factory of layers, and their place.

    Args:
        layer: Callable, `layer(name=...)` returns a new layer.
        placement: `"after"` a linear layer and before the activation, `"before"` a
            linear layer and after the activation, or `None`: nowhere.
    """

    layer: Callable | None = None
    placement: str | None = None

    @property
    def use_bias(self):
        """Whether a linear layer needs its own bias, for no norm after it has one."""
        return self.placement != "after"

    def before(self, x, name):
        """The input of the linear layer `name`."""
        return self._apply(x, name) if self.placement == "before" else x

    def after(self, x, name):
        """The output of the linear layer `name`."""
        return self._apply(x, name) if self.placement == "after" else x

    def _apply(self, x, name):
        return self.layer(name=f"{name}_norm")(x)


def batch_normalization(name):
    """BatchNormalization with PyTorch's defaults, as in the baselines of the paper."""
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=name)


NORMS = {
    "none": lambda rho, omega: Norm(),
    "bn": lambda rho, omega: Norm(batch_normalization, "after"),
    "cbn": lambda rho, omega: Norm(
        lambda name: CBN(rho=rho, omega=omega, name=name), "before"
    ),
}


def get(name, rho=1.0, omega=10.0):
    """Returns the `Norm` called `name`; `rho` and `omega` are CBN's."""
    if name not in NORMS:
        raise ValueError(
            f"Argument `norm` must be one of {sorted(NORMS)}. Received: norm={name!r}"
        )
    return NORMS[name](rho, omega)
