"""Properties may take long on a busy machine, the long run as long as it takes; so may inputs."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.fuzz.profile import is_long
from tests.support.ledger.shared_database import SharedDatabase, shared_database

TIMEOUT_S: Final = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each property its time (no limit for 50,000 examples); let a long example be shown."""
    for item in items:
        if "tests/fuzz" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore:Generating overly large repr"))
        item.add_marker(pytest.mark.timeout(0 if is_long() else TIMEOUT_S))


@pytest.fixture
def shared(database_url: str) -> Iterator[SharedDatabase]:
    """A database of the property's own, for all of its examples."""
    with shared_database(database_url) as database:
        yield database
