"""Network slimming (Liu et al.): a penalty on gamma, and removal by gamma alone.

Reference: Liu et al., Learning Efficient Convolutional Networks through Network
Slimming, ICCV 2017. https://arxiv.org/abs/1708.06519
"""

import keras
import numpy as np
from keras import ops

from keras_norms import CBN, prune
from keras_norms.surgery.channels import Channels
from keras_norms.surgery.graph import Graph
from recipes.engine import optimizers


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class SlimmingSGD(optimizers.SGD):
    """SGD with an L1 penalty on every gamma (Liu et al., Eq. 1).

    Args:
        gamma_l1: Float, the weight of the sum of |gamma|.
        *args, **kwargs: Of `optimizers.SGD`.
    """

    def __init__(self, *args, gamma_l1=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma_l1 = gamma_l1

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables or self._trainable_variables
        grads = [
            g + self.gamma_l1 * ops.sign(v) if v.name == "gamma" else g
            for g, v in zip(grads, variables)
        ]
        return super().apply(grads, trainable_variables)

    def get_config(self):
        return {**super().get_config(), "gamma_l1": self.gamma_l1}


def compiled(model, optimizer="sgd"):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def own_norms(model):
    """The norms of channels that one layer makes alone and that could go.

    Returns:
        Dict from the name of a norm to its |gamma|, in units of its input's deviation.
    """
    graph = Graph(model)
    channels = Channels(graph)
    makers = [channels.roots(labels.ids) for labels in channels.makers.values()]
    roots, counts = np.unique(np.concatenate(makers), return_counts=True)
    alone = roots[counts == 1]
    alone = alone[~channels.is_fixed(alone)]
    found = {}
    for unit, (labels, _) in channels.passers.items():
        layer = unit.layer
        if getattr(layer, "gamma", None) is None:
            continue
        if np.all(np.isin(channels.roots(labels.ids), alone)):
            gamma = np.abs(ops.convert_to_numpy(layer.gamma))
            if isinstance(layer, CBN):
                gamma = gamma / ops.convert_to_numpy(layer.rho)
            found[layer.name] = gamma
    return found


def without_smallest(model, share, images):
    """The network without the given share of channels of the smallest |gamma|.

    As Liu et al.: over all layers, each of which keeps one channel, and without beta.

    Returns:
        A `keras_norms.surgery.Pruned`.
    """
    gammas = own_norms(model)
    limit = np.quantile(np.concatenate(list(gammas.values())), share)
    model = copy(model)
    for name, gamma in gammas.items():
        dead = gamma < min(limit, np.max(gamma))
        layer = model.get_layer(name)
        for variable in (layer.gamma, layer.beta):
            if variable is not None:
                values = ops.convert_to_numpy(variable)
                variable.assign(np.where(dead, 0, values))
    return prune(model, images, gamma=0.0, similarity=None)


def copy(model):
    """A model that shares no weights with the one that it is a copy of."""
    twin = keras.models.clone_model(model, call_function=_call)
    twin.set_weights(model.get_weights())
    return compiled(twin)


def _call(layer, *args, mask=None, **kwargs):
    # Of images there are no masks, which most layers would not take.
    return layer(*args, **kwargs)
