"""The controller publishes what trainers have written: on servers of the right base model alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine
from structlog.testing import capture_logs

from controller.publishing import Publishing
from store.version_queries import list_events, numbered_version
from store.version_states import ensure_base, roll_back
from store.versions import PolicyVersion
from tests.support.controller import replicas
from tests.support.servers.fake_server import fake_model_server
from trainer.publishing.model_server import ModelServer, Replicas
from trainer.publishing.probe import ProbeRow

NOBODY = "http://127.0.0.1:9/v1"
PROBE = (ProbeRow(ids=(1, 2, 3), logprobs=(-2.0, -2.0), base_logprobs=(-0.5, -0.5)),)
RULE = {"mode": "immediate", "tolerance": 0.15}


async def write(
    engine: AsyncEngine,
    root: Path,
    policy: str = "m",
    base: str = "m",
    probe: tuple[ProbeRow, ...] = PROBE,
) -> Path:
    """Leave version 1 of a policy written, and return its folder."""
    async with engine.begin() as connection:
        await ensure_base(connection, policy, base)
        return await replicas.write(connection, root, 1, policy, probe, RULE)


async def version(engine: AsyncEngine, policy: str = "m") -> PolicyVersion:
    async with engine.connect() as connection:
        found = await numbered_version(connection, policy, 1)
    assert found is not None
    return found


async def test_version_is_promoted_with_its_probe_as_evidence(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await write(engine, tmp_path)
    async with fake_model_server() as server, Replicas([NOBODY, server.url]) as servers:
        server.logprobs = {"m": -0.5, "m@1": -2.1}
        await Publishing(servers).look(engine)
        assert server.loads == ["m@1"]
    assert (await version(engine)).state == "serving"
    async with engine.connect() as connection:
        events = await list_events(connection, "m", 1)
    assert [(event.to_state, event.actor) for event in events[::-1]] == [
        ("written", "trainer"),
        ("loaded", "controller"),
        ("serving", "controller"),
    ]
    evidence = events[1].evidence
    assert evidence is not None
    assert (evidence["tokens"], evidence["base_difference"]) == (2, 0.0)
    assert abs(evidence["mean_difference"] - 0.1) < 1e-9


async def test_version_of_another_base_model_is_left_to_another_controller(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await write(engine, tmp_path, "other", "another model")
    async with fake_model_server() as server, Replicas([server.url]) as servers:
        publishing = Publishing(servers)
        await publishing.look(engine)
        assert not server.tries
        assert publishing.waiting == {}
    assert (await version(engine, "other")).state == "written"


async def test_version_waits_while_no_server_of_its_base_model_answers(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await write(engine, tmp_path, "other", "another model")
    async with fake_model_server() as server, Replicas([NOBODY, server.url]) as servers:
        publishing = Publishing(servers)
        await publishing.look(engine)
        assert "has the base model 'another model'" in publishing.waiting["other@1"]
    assert (await version(engine, "other")).state == "written"


async def test_version_on_a_slow_server_delays_no_other_policys(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.publishing.TRY_S", 0.2)
    await write(engine, tmp_path, "slow")
    await write(engine, tmp_path, "m")
    async with fake_model_server() as server, Replicas([server.url]) as servers:
        server.logprobs = {"m": -0.5, "m@1": -2.0, "slow@1": -2.0}
        loading, publishing = asyncio.Event(), Publishing(servers)
        real = ModelServer.load

        async def slowly(self: ModelServer, name: str, *files: Any) -> None:
            if name == "slow@1":
                await loading.wait()
            await real(self, name, *files)

        monkeypatch.setattr(ModelServer, "load", slowly)
        await publishing.look(engine)
        while (await version(engine)).state != "serving":
            await publishing.look(engine)
        assert (await version(engine, "slow")).state == "written"
        loading.set()
        while (await version(engine, "slow")).state != "serving":
            await publishing.look(engine)
        assert server.loads == ["m@1", "slow@1"]
        await publishing.close()


async def test_version_without_probe_rows_is_rejected(engine: AsyncEngine, tmp_path: Path) -> None:
    await write(engine, tmp_path, probe=())
    async with fake_model_server() as server, Replicas([server.url]) as servers:
        await Publishing(servers).look(engine)
        assert server.loaded == {}
    assert (await version(engine)).state == "rejected"


async def test_person_gives_up_a_version_that_waits(engine: AsyncEngine, tmp_path: Path) -> None:
    await write(engine, tmp_path)
    async with engine.begin() as connection:
        await roll_back(connection, await version(engine), reason="no disk", actor="operator")
    assert (await version(engine)).state == "rejected"


async def test_altered_version_waits_until_its_files_are_restored(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    weights = await write(engine, tmp_path) / "adapter_model.safetensors"
    right = weights.read_bytes()
    async with fake_model_server() as server, Replicas([server.url]) as servers:
        server.logprobs = {"m": -0.5, "m@1": -2.0}
        publishing = Publishing(servers)
        weights.write_bytes(b"other weights")
        with capture_logs() as logs:
            await publishing.look(engine)
            # It is tried again after a pause, and logged once.
            await publishing.look(engine)
        assert [line["event"] for line in logs] == ["version_waits"]
        assert "restore it from a backup" in publishing.waiting["m@1"]
        assert not server.tries
        weights.write_bytes(right)
        await Publishing(servers).look(engine)
    assert (await version(engine)).state == "serving"


async def test_two_controllers_publish_a_version_once(engine: AsyncEngine, tmp_path: Path) -> None:
    await write(engine, tmp_path)
    async with (
        fake_model_server() as server,
        Replicas([server.url]) as servers,
        Replicas([server.url]) as others,
    ):
        server.logprobs = {"m": -0.5, "m@1": -2.0}
        other, looked = Publishing(others), False

        async def first() -> None:
            nonlocal looked
            if not looked:
                looked = True
                await other.look(engine)

        server.at_load = first
        await Publishing(servers).look(engine)
        assert set(server.loaded) == {"m@1"}
    assert (await version(engine)).state == "serving"
    async with engine.connect() as connection:
        assert len(await list_events(connection, "m", 1)) == 3
