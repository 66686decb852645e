"""The long run takes as long as it takes."""

import pytest

from tests.fuzz.profile import is_long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the timeout from properties that try 50,000 examples."""
    for item in items:
        if is_long() and "tests/fuzz" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(0))
