"""Settings of all tests.

`--hypothesis-profile=many` tries twenty times as many examples of each property.
"""

from hypothesis import settings

settings.register_profile("many", max_examples=2000, deadline=None)
