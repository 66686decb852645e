"""Share a stand of benches between the tests of rebuilds."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.embedded import EmbeddedPostgres
from tests.conftest import Psql
from tests.support.trainer.rebuilding import Stand


@pytest.fixture
async def stand(
    postgres: EmbeddedPostgres, psql: Psql, template: str, tmp_path: Path, tiny_model: str
) -> AsyncIterator[Stand]:
    made = Stand(postgres, psql, template, tmp_path, tiny_model)
    async with made.open:
        yield made
