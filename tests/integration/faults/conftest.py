"""Share what the tests of faults have in common."""

import pytest

from tests.support.faults.counters import count_from_here


@pytest.fixture(autouse=True)
def _counted_from_here() -> None:
    """Keep what tests before left in their spools out of a test's sums."""
    count_from_here()
