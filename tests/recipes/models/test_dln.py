import numpy as np
import pytest

from recipes.models import norms
from recipes.models.dln import SumOfSquares, dln, regression
from tests.support.backend import numpy


def test_a_product_of_matrices_and_its_linear_data():
    model = dln(norms.get("none"), dimension=4, depth=5)
    kernels = [numpy(v) for v in model.trainable_variables]
    assert [kernel.shape for kernel in kernels] == [(4, 4)] * 5
    x, y = regression(0, 4, 30)
    product = x @ np.linalg.multi_dot(kernels)
    np.testing.assert_allclose(numpy(model(x)), product, atol=1e-5)
    expected = np.square(product - y.astype("float64")).sum()
    assert float(SumOfSquares()(y, product)) == pytest.approx(expected, rel=1e-5)

    assert x.shape == y.shape == (30, 4) and x.dtype == y.dtype == "float32"
    matrix, *_ = np.linalg.lstsq(x, y, rcond=None)
    np.testing.assert_allclose(x @ matrix, y, atol=1e-4)
    np.testing.assert_array_equal(regression(0, 4, 30)[1], y)
    assert not np.array_equal(regression(1, 4, 30)[0], x)


def test_norms_stand_after_all_layers_but_the_last():
    names = [layer.name for layer in dln(norms.get("lp1"), 3, 3).layers[1:]]
    assert names == ["layer1", "layer1_norm", "layer2", "layer2_norm", "layer3"]
    for norm in ("cbn", "ws"):
        with pytest.raises(ValueError, match="Argument `norm` must stand after"):
            dln(norms.get(norm))
