"""Set up a proxy with rules that redact, and search all places for what they take out."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.settings import ProxySettings
from store.schema.tables import metadata
from store.version_states import ensure_base
from tests.integration.conftest import settings_for
from tests.support.proxy.kept_files import bytes_now, paths_of
from tests.support.servers.fake_upstream import FakeUpstream

RULES = """
[[rule]]
name = "canary"
pattern = 'canary-[0-9]{4}'

[[rule]]
name = "user"
field = "request.user"
"""
FINDS = (b"canary-", b"nobody@example.org", b"secret-")


def hit(data: bytes) -> list[bytes]:
    """Find what of the canaries is in some bytes, as they are or as PostgreSQL writes bytes."""
    return [one for one in FINDS if one in data or one.hex().encode() in data]


def leaks(places: Iterable[bytes]) -> list[list[bytes]]:
    return [found for found in map(hit, places) if found]


def files(folder: Path) -> list[bytes]:
    return [os.fsencode(path) + bytes_now(path) for path in paths_of(folder)]


async def rows(engine: AsyncEngine) -> list[bytes]:
    async with engine.connect() as connection:
        return [
            str(row).encode()
            for name in metadata.tables
            for row in await connection.execute(text(f"SELECT t::text FROM {name} t"))
        ]


@pytest.fixture
async def settings(
    database_url: str, engine: AsyncEngine, upstream: FakeUpstream, tmp_path: Path
) -> ProxySettings:
    """Set up rules for a proxy whose policy `m` is the base model."""
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    folder = tmp_path / "of-proxy"
    folder.mkdir()
    return settings_for(database_url, upstream.url, folder).model_copy(update={"redaction": rules})


def said(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": one} for one in contents]}
