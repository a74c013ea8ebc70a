import keras
import numpy as np
import pytest

from recipes.models import norms
from recipes.models.dln import SumOfSquares, dln, regression
from tests.support import smoothness_reference as reference


def test_is_a_product_of_matrices():
    model = dln(norms.get("none"), dimension=4, depth=5)
    kernels = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    assert [kernel.shape for kernel in kernels] == [(4, 4)] * 5
    x, y = regression(0, 4, 30)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), x @ np.linalg.multi_dot(kernels), atol=1e-5
    )
    expected, _ = reference.loss_and_gradients(kernels, x, y)
    loss = SumOfSquares()(y, x @ np.linalg.multi_dot(kernels))
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_regression_is_linear_and_repeats():
    x, y = regression(3, 5, 50)
    assert x.shape == y.shape == (50, 5) and x.dtype == y.dtype == "float32"
    matrix, *_ = np.linalg.lstsq(x, y, rcond=None)
    np.testing.assert_allclose(x @ matrix, y, atol=1e-4)
    np.testing.assert_array_equal(regression(3, 5, 50)[1], y)
    assert not np.array_equal(regression(4, 5, 50)[0], x)


@pytest.mark.parametrize("norm", ["bn", "noisy_bn", "lp1", "lp2", "lpinf"])
def test_norms_stand_after_all_layers_but_the_last(norm):
    model = dln(norms.get(norm), dimension=3, depth=4)
    names = [layer.name for layer in model.layers[1:]]
    pairs = [[f"layer{i}", f"layer{i}_norm"] for i in (1, 2, 3)]
    assert names == [*sum(pairs, []), "layer4"]
    assert type(model.get_layer("layer2_norm")) is type(norms.get(norm).layer(3, "n"))


@pytest.mark.parametrize("norm", ["cbn", "ws"])
def test_other_places_are_refused(norm):
    with pytest.raises(ValueError, match="Argument `norm` must stand after"):
        dln(norms.get(norm))
