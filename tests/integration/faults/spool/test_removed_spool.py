"""Somebody removes the spool directory of a proxy that runs."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from proxy.feedback import KeyFiles
from proxy.policies.version_file import VersionFile, serving_of
from store.keys import create_key
from tests.integration.conftest import Proxy
from tests.support.waiting import eventually, until


async def test_what_comes_after_is_stored_and_new_workers_are_told_who_serves(
    proxy: Proxy,
) -> None:
    assert (await proxy.chat()).status == 200
    await proxy.episodes(1)
    spool = proxy.settings.spool_dir
    shutil.rmtree(spool)
    assert (await proxy.chat()).status == 200
    status, _ = await proxy.feedback({"value": 1, "episode": "later"}, **{"Idempotency-Key": "k"})
    assert status == 202
    await proxy.episodes(2)
    await until(lambda: "m" in serving_of(VersionFile(spool).read() or []))


async def test_keys_that_were_made_count_on_though_their_file_is_gone(
    proxy: Proxy, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await create_key(connection, "agent", ("infer",))

    async def asked_for() -> bool:
        return (await proxy.chat()).status == 401

    await eventually(asked_for)
    for _ in range(3):
        shutil.rmtree(proxy.settings.spool_dir, ignore_errors=True)
        # Longer than a worker takes to see it.
        over = asyncio.get_running_loop().time() + 0.4
        while asyncio.get_running_loop().time() < over:
            assert (await proxy.chat()).status == 401


def test_a_disk_that_does_not_free_a_key_is_no_error_of_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = KeyFiles(tmp_path)
    assert files.take("k", "a") is None

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", read_only)
    files.give_back("k")
