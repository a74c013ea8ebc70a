"""What the argument `norm` of `convert` asks for."""

import functools

import keras

from keras_norms._checks import arguments
from keras_norms.layers import kernels
from keras_norms.layers.cbn import CBN
from keras_norms.layers.cwn import CWN
from keras_norms.layers.fused_cbn import FusedCBN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.layers.wn import WN
from keras_norms.layers.ws import WS
from keras_norms.surgery._graph.remake import config_of, from_config

_NO_NORMS = (keras.Model, FusedCBN, *kernels.WITH_A_KERNEL)
NAMES = {
    "cbn": CBN,
    "noisy_bn": NoisyBN,
    "lp_norm": LpNorm,
    "ws": WS,
    "cwn": CWN,
    "wn": WN,
    "batch_norm": keras.layers.BatchNormalization,
    "group_norm": keras.layers.GroupNormalization,
    "instance_norm": keras.layers.GroupNormalization,
    "layer_norm": keras.layers.LayerNormalization,
    "rms_norm": keras.layers.RMSNormalization,
}


class Template:
    """What the argument `norm` asks for.

    `cls` is the class of the new layers, or `None` where a function makes them, or
    where `is_none`. `is_name` says that a name was given, `is_given` that it was
    neither a name nor a class.
    """

    def __init__(self, norm):
        self.cls = self.function = None
        self.keywords, self.is_given = {}, not isinstance(norm, (str, type))
        cls = norm.func if isinstance(norm, functools.partial) else norm
        self.is_name, self.is_none = isinstance(norm, str), False
        if isinstance(norm, str):
            self.cls, self.is_none = NAMES.get(norm), norm == "none"
            self.keywords = {"groups": -1} if norm == "instance_norm" else {}
        elif isinstance(norm, keras.layers.Layer):
            self.cls, self.keywords = type(norm), config_of(norm)
            for name in ("name", "dtype", "layer", "build_config"):
                self.keywords.pop(name, None)
        elif isinstance(cls, type) and issubclass(cls, keras.layers.Layer):
            if not getattr(norm, "args", ()):
                self.cls, self.keywords = cls, getattr(norm, "keywords", {})
        elif callable(norm) and not isinstance(cls, type):
            self.function = norm
        is_no_norm = self.cls is not None and issubclass(self.cls, _NO_NORMS)
        if is_no_norm or (self.cls is self.function and not self.is_none):
            names = ", ".join(repr(name) for name in [*NAMES, "none"])
            wanted = f"one of {names}, a normalisation layer or its class, or a "
            wanted += "function from a BatchNormalization layer to its replacement. "
            wanted += "For FusedCBN pass CBN and `fused=True`"
            raise arguments.wrong("norm", wanted, norm)

    def fits(self, unit):
        """Whether a norm of the class has the settings that were given."""
        given = self.keywords.keys() - {"axis", "trainable"}
        return all(unit.config[name] == self.keywords[name] for name in given)

    def config(self, name, dtype, trainable=True, **changes):
        """A whole configuration of a new layer."""
        given = {**self.keywords, **changes, "name": name, "dtype": dtype}
        if not trainable:
            given["trainable"] = False
        # A layer's own view of its arguments, defaults included.
        return config_of(from_config(self.cls, given))
