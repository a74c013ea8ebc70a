"""Settings of all tests.

`--hypothesis-profile=many` tries twenty times as many examples of each property.
"""

import pathlib

from hypothesis import settings

settings.register_profile("many", max_examples=2000, deadline=None)

HERE = pathlib.Path(__file__).parent
# Those of keras_norms. To measure coverage nearly doubles what a test takes.
COVERING = ("test_amat.py", "test_public_arguments.py")
COVERING += ("diagnostics", "layers", "ops", "surgery")


def pytest_collection_modifyitems(items):
    places = [HERE / name for name in COVERING]
    for item in items:
        if not any(item.path.is_relative_to(place) for place in places):
            item.add_marker("no_cover")
