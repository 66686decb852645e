"""Publish versions with their files, and run a controller of some replicas in this process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controller.publishing import Publishing
from controller.reconciler import Reconciler
from controller.replicas import ReplicaController, ServableVersions, show_troubles
from controller.run import app_of, look_forever, working
from store.claims import begin_update, record_update
from store.schema.tables import MANIFEST_SHA256
from store.version_states import ensure_base
from tests.support.controller.trials import settings_of
from tests.support.ledger.lineage import promote
from tests.support.servers.fake_server import FakeModelServer
from tests.support.waiting import awaited
from trainer.publishing.adapters import MANIFEST, SERVED_FILES, NewVersion, sha256_of, write_version
from trainer.publishing.model_server import Replicas
from trainer.publishing.probe import ProbeRow
from trainer.publishing.sources import AdapterFiles

POLL_S = 0.05


def save(folder: Path) -> None:
    for name in SERVED_FILES:
        (folder / name).write_text(f"{name} of {folder.name}")


async def write(
    connection: AsyncConnection,
    root: Path,
    number: int,
    policy: str = "m",
    probe: tuple[ProbeRow, ...] = (),
    rule: Mapping[str, Any] | None = None,
) -> Path:
    """Leave a version of a policy written, as its trainer does, and return its folder."""
    new = NewVersion(
        policy=policy,
        version=number,
        update_id=await begin_update(connection, policy, 0, {}),
        parent_version=0,
        outcomes=(),
        metrics={},
        probe=probe,
    )
    folder = write_version(root, new, save)
    hashed = {MANIFEST_SHA256: sha256_of(folder / MANIFEST)}
    await record_update(
        connection,
        new.update_id,
        (),
        hashed,
        policy=policy,
        version=number,
        adapter_path=str(folder),
        rule=rule,
    )
    return folder


async def publish(
    engine: AsyncEngine,
    root: Path,
    *numbers: int,
    policy: str = "m",
    base: str = "m",
    probe: tuple[ProbeRow, ...] = (),
) -> None:
    """Make versions of a policy with files below `root`, of which the last gets the traffic."""
    async with engine.begin() as connection:
        await ensure_base(connection, policy, base)
        for number in numbers:
            await write(connection, root, number, policy, probe)
            await promote(connection, policy, number)


async def reconcile(engine: AsyncEngine, servers: Replicas) -> None:
    """Do once what a controller does again and again: load what servers lack, unload the rest."""
    servable = ServableVersions()
    reconcilers = {server: Reconciler(server) for server in servers.each}
    await servable.look(engine)
    await servers.ask(
        lambda server: reconcilers[server].look(servable.versions, unserved=servable.unserved)
    )


async def unload(engine: AsyncEngine, number: int) -> None:
    """Let no server keep a retired version, though a roll-back might give it the traffic."""
    async with engine.begin() as connection:
        unloaded = text("UPDATE policies SET unloaded_at = now() WHERE version = :version")
        await connection.execute(unloaded, {"version": number})


@dataclass
class RunningController:
    """Hold what a controller in this process knows of the versions and the replicas."""

    servable: ServableVersions
    controllers: list[ReplicaController]
    publishing: Publishing

    def reasons(self, kind: str) -> dict[str, Any]:
        """Return why versions are not loaded, by name; `kind`: altered, unread or misserved."""
        return dict(show_troubles(self.controllers)[kind])


@asynccontextmanager
async def controlling(
    engine: AsyncEngine, *urls: str, files: AdapterFiles | None = None
) -> AsyncIterator[RunningController]:
    """Run a controller of these replicas, in this process."""
    servable = ServableVersions()
    async with AsyncExitStack() as exits:
        replicas = await exits.enter_async_context(Replicas(urls, files=files))
        controllers = [ReplicaController(server, servable, POLL_S) for server in replicas.each]
        publishing = Publishing(replicas)
        looks = {"controller": servable.look, "publishing": publishing.look}
        reading = [
            look_forever(settings_of(engine), POLL_S, name, look) for name, look in looks.items()
        ]
        async with working(reading), working([each.reconcile_forever() for each in controllers]):
            yield RunningController(servable, controllers, publishing)


async def assert_has(server: FakeModelServer, *names: str) -> None:
    """Assert that before long these adapters are loaded, and no other."""

    async def loaded() -> set[str]:
        return set(server.loaded)

    assert await awaited(loaded, lambda found: found == set(names)) == set(names)


@asynccontextmanager
async def asked(controller: RunningController) -> AsyncIterator[tuple[dict[str, Any], str]]:
    """Give what the controller's port says."""
    app = app_of(controller.servable, controller.controllers, controller.publishing)
    async with TestClient(TestServer(app)) as client:
        ready = await (await client.get("/readyz")).json()
        yield ready, await (await client.get("/metrics")).text()
