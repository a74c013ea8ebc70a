"""What the argument `norm` of `convert` asks for."""

import functools

import keras

from keras_norms._checks import arguments
from keras_norms.layers.cbn import CBN
from keras_norms.layers.cwn import CWN
from keras_norms.layers.lp_norm import LpNorm
from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.layers.wn import WN
from keras_norms.layers.ws import WS
from keras_norms.surgery._graph.remake import config_of, from_config

NAMES = {
    "cbn": CBN,
    "noisy_bn": NoisyBN,
    "lp_norm": LpNorm,
    "ws": WS,
    "cwn": CWN,
    "wn": WN,
}


class Template:
    """What the argument `norm` asks for.

    `cls` is the class of the new layers, or `None` where a function makes them.
    """

    def __init__(self, norm):
        self.cls = self.function = None
        self.keywords, self.is_given = {}, not isinstance(norm, (str, type))
        cls = norm.func if isinstance(norm, functools.partial) else norm
        if isinstance(norm, str):
            self.cls = NAMES.get(norm)
        elif isinstance(norm, keras.layers.Layer):
            self.cls, self.keywords = type(norm), config_of(norm)
            for name in ("name", "dtype", "layer", "build_config"):
                self.keywords.pop(name, None)
        elif isinstance(cls, type) and issubclass(cls, keras.layers.Layer):
            if not getattr(norm, "args", ()):
                self.cls, self.keywords = cls, getattr(norm, "keywords", {})
        elif callable(norm) and not isinstance(cls, type):
            self.function = norm
        is_model = self.cls is not None and issubclass(self.cls, keras.Model)
        if is_model or self.cls is self.function:
            raise _wrong_norm(norm)

    def config(self, name, dtype, **changes):
        """A whole configuration of a new layer."""
        given = {**self.keywords, **changes, "name": name, "dtype": dtype}
        # A layer's own view of its arguments, defaults included.
        return config_of(from_config(self.cls, given))


def _wrong_norm(norm):
    names = ", ".join(repr(name) for name in NAMES)
    return ValueError(
        f"Argument `norm` must be one of {names}, a layer or a class of layers, or a "
        "function from a BatchNormalization layer to a layer. "
        f"Received: norm={arguments.shown(norm)}"
    )
