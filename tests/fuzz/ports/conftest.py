"""A proxy for each property, which all of its examples share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.ports.running import Ports, ports_of


@pytest.fixture
def ports(database_url: str, tmp_path: Path) -> Iterator[Ports]:
    """Both ports of a running proxy; nothing of it may have failed in the end."""
    with ports_of(database_url, tmp_path) as ports:
        yield ports
