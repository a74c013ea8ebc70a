"""Settings of all tests.

`--hypothesis-profile=many` tries ten times as many examples of each property.
"""

from hypothesis import settings

settings.register_profile("many", max_examples=1000, deadline=None)
