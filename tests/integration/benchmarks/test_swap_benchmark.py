"""The swap benchmark on a real proxy and database; the model server is scripted."""

import asyncio
import json
from pathlib import Path

import msgspec
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.swap.clients import CALLS, Clients
from benchmarks.swap.figures import Run, figures
from benchmarks.swap.ledger import LOOK_S, read_ledger
from benchmarks.swap.preparing import PROBE, prepared
from benchmarks.swap.publishing import Place, publishing
from benchmarks.swap.records import Event, Load, Seen
from benchmarks.swap.run import RECIPE
from benchmarks.swap.schedule import plan
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.integration.conftest import proxy_with, settings_for
from tests.support.records import call
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.servers.fake_upstream import stream_chunks
from tests.support.waiting import until
from trainer.publishing.adapters import SERVED
from trainer.publishing.probing.probe import ProbeRow

# What the server says of a version, and of the one before: a version that changes nothing is none.
LOGPROBS = {"m@1": -2.0, "m@2": -1.0}


def write_adapters(folder: Path) -> Path:
    """Write files that a scripted server takes for adapters, with what a probe should find."""
    for number, logprob in enumerate(LOGPROBS.values()):
        own = prepared(folder, number)
        own.mkdir(parents=True)
        for name in SERVED:
            (own / name).write_text(f"{name} {number}")
        rows = [ProbeRow(ids=(1, 2, 3), logprobs=(logprob,))]
        (own / PROBE).write_bytes(msgspec.json.encode(rows))
    return folder


async def stream(request: web.Request) -> web.StreamResponse:
    """Answer with a few chunks and what they come to."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    asked = await request.json()
    for chunk in stream_chunks(asked, 1):
        await response.write(chunk)
    told = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
    await response.write(b"data: " + json.dumps(told).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def started(server: FakeModelServer, database_url: str, folder: Path) -> Place:
    """Set up the scripted server, and say where all is."""
    server.logprobs, server.chats = dict(LOGPROBS), stream
    recipe = folder / "swap.toml"
    recipe.write_text(RECIPE.format(retire_after_s=600.0))
    return Place(
        database_url=database_url,
        server_url=server.url,
        adapter_dir=folder / "adapters",
        prepared=await asyncio.to_thread(write_adapters, folder / "prepared"),
        recipe=str(recipe),
        policy="m",
        slots=8,
        log=folder / "publisher.log",
    )


async def test_versions_are_published_while_clients_stream(
    database_url: str, engine: AsyncEngine, tmp_path: Path
) -> None:
    events: list[Event] = []
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
    async with fake_model_server() as server:
        place = await started(server, database_url, tmp_path)
        settings = settings_for(database_url, server.url, tmp_path)
        async with (
            proxy_with(settings, engine) as proxy,
            Clients(f"{proxy.url}/v1", "m", 2) as clients,
            publishing(place, events.append) as own,
        ):
            for name in LOGPROBS:
                await own.load()
                if name == "m@1":
                    await clients.until_served(name)
                    clients.start()
                await until(lambda name=name: any(one.version == name for one in clients.calls))
            await clients.stop()
            stored, retired = await read_ledger(engine, {call.id for call in clients.calls})
    assert len(clients.calls) % CALLS == 0
    seen = {call.id for call in clients.calls}
    # Those that asked until the first version served are not among them.
    assert seen <= {one.id for one in stored}
    schedule = plan(clients.calls[0].began, 1.0, 1)
    found = figures(
        Run(
            policy="m",
            layers=0,
            streams=2,
            minutes=1.0,
            slots=8,
            probe_s=0.0,
            schedule=schedule,
            calls=clients.calls,
            gaps=clients.gaps,
            events=events,
            stored=stored,
            retired=retired,
        )
    )
    assert [type(event) for event in events] == [Load, Seen, Load, Seen]
    assert (found.loads, found.rejected, found.failed) == (1, (), 0), found.reasons
    kept = found.episodes
    assert (kept.changed, kept.had_to_leave, kept.unstored, kept.misnamed) == (0, 0, 0, 0)
    assert (found.most_loaded, found.never_seen) == (2, 0)
    assert found.first_token is not None


async def test_the_ledger_is_read_once_the_clients_own_calls_are_stored(
    engine: AsyncEngine,
) -> None:
    first, late = call("swap-first-0"), call("swap-0-0")
    await Ingester().store(engine, [first])
    reading = asyncio.create_task(read_ledger(engine, {str(late.id)}))
    await asyncio.sleep(2 * LOOK_S)
    assert not reading.done()
    await Ingester().store(engine, [late])
    stored, _ = await reading
    assert {one.id for one in stored} == {str(first.id), str(late.id)}
