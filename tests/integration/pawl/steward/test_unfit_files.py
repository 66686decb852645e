"""Files that were altered or cannot be read are not loaded, are told of, and hinder no other."""

import asyncio
import re
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.policies import versions_of
from tests.support.faults.unreadable import unreadable
from tests.support.servers.fake_server import FakeModelServer
from tests.support.steward.replicas import POLL_S, asked, assert_has, publish, server, stewarding
from tests.support.waiting import until
from trainer.publishing.adapters import MANIFEST, SERVED

__all__ = ["server"]


async def test_altered_files_are_not_loaded_and_hinder_no_other(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    weights = tmp_path / "m" / "2" / SERVED[1]
    whole = weights.read_bytes()
    weights.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    async with stewarding(database_url, server.url) as steward:
        await assert_has(server, "m@1")
        await until(lambda: bool(steward.altered))
        # Ten looks later, too.
        await asyncio.sleep(10 * POLL_S)
        assert server.tries["m@2"] == 0
        assert set(server.loaded) == {"m@1"}
        assert list(steward.altered) == ["m@2"]
        assert "SHA-256" in steward.altered["m@2"]
        async with asked(steward) as (ready, metrics):
            assert (ready["status"], list(ready["altered"])) == ("degraded", ["m@2"])
            assert 'pawl_steward_altered_adapters{version="m@2"} 1.0' in metrics
            assert f'outcome="altered",replica="{server.url}"' in metrics
        [_, one, two] = await versions_of(engine, "m")
        assert (one.altered, two.altered) == (False, True)
        weights.write_bytes(whole)
        await assert_has(server, "m@1", "m@2")
        async with asked(steward) as (ready, metrics):
            assert (ready["status"], ready["altered"]) == ("ready", {})
            assert "pawl_steward_altered_adapters{" not in metrics


async def test_files_that_cannot_be_read_for_now_are_loaded_later_and_hinder_no_other(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1, 2)
    with unreadable(tmp_path / "m" / "2" / SERVED[1]):
        async with stewarding(database_url, server.url) as steward:
            # The one that serves comes first, and fails; the other is loaded at the same look.
            await assert_has(server, "m@1")
            await until(lambda: bool(steward.unread))
            assert list(steward.unread) == ["m@2"]
            assert "cannot be read (Input/output error)" in steward.unread["m@2"]
            assert steward.altered == {}
            # Ten looks at least, and it is not tried at each of them: again after 1, 2 and 4 s.
            await asyncio.sleep(10 * POLL_S)
            async with asked(steward) as (ready, metrics):
                assert (ready["status"], ready["unread"]) == ("degraded", steward.unread)
                assert ready["altered"] == {}
                assert re.search(rf'outcome="unread",replica="{server.url}"}} [123]\.0', metrics)
            [_, one, two] = await versions_of(engine, "m")
            assert (one.unread, two.unread, two.altered) == (False, True, False)
            assert server.tries["m@2"] == 0
    async with stewarding(database_url, server.url) as steward:
        await assert_has(server, "m@1", "m@2")


async def test_what_could_not_be_read_is_loaded_by_the_same_steward_once_it_can(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    async with stewarding(database_url, server.url) as steward:
        with unreadable(tmp_path / "m" / "1" / MANIFEST):
            await until(lambda: "m@1" in steward.unread)
        await assert_has(server, "m@1")
        assert steward.unread == {}


async def test_files_are_checked_at_each_load_and_not_only_at_the_first(
    database_url: str, engine: AsyncEngine, server: FakeModelServer, tmp_path: Path
) -> None:
    await publish(engine, tmp_path, 1)
    async with stewarding(database_url, server.url) as steward:
        await assert_has(server, "m@1")
        (tmp_path / "m" / "1" / SERVED[0]).write_text("other")
        server.loaded.clear()
        await until(lambda: "m@1" in steward.altered)
        assert not server.loaded
