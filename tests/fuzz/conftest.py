"""The long run takes as long as it takes, and inputs may be long."""

import pytest

from tests.fuzz.profile import is_long


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the timeout from properties that try 50,000 examples; let a long example be shown."""
    for item in items:
        if "tests/fuzz" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore:Generating overly large repr"))
        if is_long():
            item.add_marker(pytest.mark.timeout(0))
