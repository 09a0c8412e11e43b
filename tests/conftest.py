"""Settings of all tests.

Property tests draw the same examples in every run and have no deadline: whether the suite passes depends neither on
chance nor on how busy the machine is. To look for new failures: ``pytest --hypothesis-profile=default``.
"""

from hypothesis import settings

settings.load_profile("ci")
