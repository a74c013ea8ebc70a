"""Other norms in the place of BatchNormalization, under its name."""

import keras

from keras_norms.layers.noisy_bn import NoisyBN
from keras_norms.surgery._graph import affine as affine_lib
from keras_norms.surgery._graph.remake import config_of

# What NoisyBN and LpNorm have in common with the layer whose place they take.
_SHARED_WITH_BATCH_NORM = (
    *("momentum", "center", "beta_initializer", "gamma_initializer"),
    *("beta_regularizer", "gamma_regularizer", "beta_constraint", "gamma_constraint"),
)


def replace_norms(units, template, preserve):
    """Turn every BatchNormalization into another layer of the same name.

    Returns:
        Dictionary from the new units to their map and to the statistics of their
        inputs; and the names of layers that may change the function.
    """
    new, changed = {}, []
    for unit in filter(affine_lib.is_batch_norm, units):
        cls, config = template.cls, None
        if template.function is not None:
            layer = template.function(unit.layer)
            if layer is None or layer is unit.layer:
                continue
            if not isinstance(layer, keras.layers.Layer):
                raise ValueError(
                    "Argument `norm` must return a Keras layer or None. "
                    f"Received: {layer!r} for layer '{unit.name}'"
                )
            cls, config = type(layer), {**config_of(layer), "name": unit.name}
        else:
            config = template.config(
                unit.name, unit.config["dtype"], **_own_settings(unit, template)
            )
        if cls not in affine_lib.NORM_CLASSES:
            changed += [unit.name] if preserve else []
            unit.become(cls, config, {})
            continue
        affine = affine_lib.affine_of(unit)
        known = unit.weight("moving_mean"), unit.weight("moving_variance")
        unit.become(cls, config, {})
        new[unit] = affine, affine_lib.Statistics(*known)
    return new, changed


def _own_settings(unit, template):
    """What a new norm has of the BatchNormalization whose place it takes."""
    if template.cls not in affine_lib.NORM_CLASSES:
        return {}
    names = ["axis"]
    if not template.is_given:
        names += _SHARED_WITH_BATCH_NORM
        # The scale of LpNorm makes up for its norm.
        names += ("epsilon", "scale") if template.cls is NoisyBN else ()
    return {name: unit.config[name] for name in names}
