"""Settings of all tests.

`--hypothesis-profile=many` tries twenty times as many examples of each property.
"""

import pathlib

from hypothesis import settings

from tests.support.backend import BACKEND

settings.register_profile("many", max_examples=2000, deadline=None)

HERE = pathlib.Path(__file__).parent
# Where coverage is measured, which takes as long as tests themselves: those of
# keras_norms, and on JAX those of what it has of its own.
COVERING = "diagnostics layers ops surgery test_amat.py test_public_arguments.py"
if BACKEND == "jax":
    COVERING = "diagnostics/test_gradients.py ops surgery/test_inline.py test_amat.py "
    COVERING += "layers/test_fused_cbn.py layers/test_learning_rate.py "
    COVERING += "layers/test_recomputation.py surgery/test_recalibrate.py"


def pytest_collection_modifyitems(items):
    places = [HERE / name for name in COVERING.split()]
    for item in items:
        if not any(item.path.is_relative_to(place) for place in places):
            item.add_marker("no_cover")
