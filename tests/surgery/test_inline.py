"""All of surgery, one after the other, on every backend."""

import keras
import numpy as np
from keras import layers

from keras_norms import CBN, prune, recalibrate
from tests.support import planted
from tests.support import surgery_models as m


def test_convert_save_recalibrate_prune_and_fold(tmp_path):
    keras.utils.set_random_seed(0)  # with which one channel is dead, and no other
    first = layers.Conv2D(3, 3, activation="relu", name="first")
    conv, pooling = layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()
    model = m.model_of((8, 8, 2), first, conv, m.Block(), pooling, layers.Dense(2))
    first.bias.assign([0.5, -99.0, 0.5])  # a dead channel
    x = m.images(12, 8, 8, 2)
    new = m.check_convert(model, CBN(rho=2), x, data=x)
    norms = m.of_class(new, CBN)
    assert len(norms) == 4 and not m.norms_in(new)
    new.save(tmp_path / "new.keras")
    m.assert_same_outputs(keras.models.load_model(tmp_path / "new.keras"), new, x, 0)
    # The same statistics, of another pass
    before = [norm.get_weights() for norm in norms]
    recalibrate(new, x, batch_size=12, verbose=0)
    for norm, weights in zip(norms, before):
        for actual, expected in zip(norm.get_weights(), weights, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    m.assert_same_outputs(new, model, x, 1e-3)
    pruned = prune(new, x)
    assert planted.removed(pruned) == {"first": [1]}
    m.assert_same_outputs(m.check_fold(pruned.model, x), new, x, 2e-5)
