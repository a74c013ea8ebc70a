"""Network slimming (Liu et al., see pruning.py): a penalty on gamma, and removal."""

import keras
import numpy as np
from keras import ops

from keras_norms import CBN, prune
from keras_norms.surgery.channels import Channels
from keras_norms.surgery.graph import Graph
from recipes.engine import optimizers


@keras.saving.register_keras_serializable(package="keras_norms_recipes")
class SlimmingSGD(optimizers.SGD):
    """SGD of the loss and `gamma_l1` times the sum of |gamma| (Liu et al., Eq. 1)."""

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
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def own_norms(model):
    """The |gamma|, over the input's deviation, of norms whose channels one layer makes.

    A dict by name; norms of channels that cannot go are not in it.
    """
    channels = Channels(Graph(model))
    makers = [channels.roots(labels.ids) for labels in channels.makers.values()]
    roots, counts = np.unique(np.concatenate(makers), return_counts=True)
    alone = roots[(counts == 1) & ~channels.is_fixed(roots)]
    found = {}
    for unit, (labels, _) in channels.passers.items():
        layer, gamma = unit.layer, getattr(unit.layer, "gamma", None)
        if gamma is not None and np.isin(channels.roots(labels.ids), alone).all():
            rho = layer.rho if isinstance(layer, CBN) else 1
            found[layer.name] = np.abs(ops.convert_to_numpy(gamma / rho))
    return found


def without_smallest(model, share, images):
    """The network without the given share of channels of the smallest |gamma|.

    As Liu et al.: over all layers, each of which keeps one channel, and without beta.
    """
    gammas = own_norms(model)
    limit = np.quantile(np.concatenate(list(gammas.values())), share)
    model = copy(model)
    for name, gamma in gammas.items():
        dead = gamma < min(limit, np.max(gamma))
        layer = model.get_layer(name)
        for variable in (layer.gamma, layer.beta):
            if variable is not None:
                variable.assign(ops.convert_to_numpy(variable) * ~dead)
    return prune(model, images, gamma=0.0, similarity=None)


def copy(model):
    """A model that shares no weights with the one that it is a copy of."""

    def call(layer, *args, mask=None, **kwargs):
        # Of images there are no masks, which most layers would not take.
        return layer(*args, **kwargs)

    twin = keras.models.clone_model(model, call_function=call)
    twin.set_weights(model.get_weights())
    return compiled(twin)
