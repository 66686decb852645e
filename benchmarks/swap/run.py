"""Run clients and publisher beside each other on a whole stack of their own."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.stack import small_plan
from benchmarks.swap.clients import CALLS, Clients
from benchmarks.swap.figures import Found, Run, figures
from benchmarks.swap.ledger import read_ledger
from benchmarks.swap.preparing import prepare
from benchmarks.swap.publishing import Place, publish_all
from benchmarks.swap.records import Event, Load
from benchmarks.swap.schedule import Schedule, plan
from pawl.stack.model import unpacked_model
from pawl.stack.stack import Stack, running_stack
from store.connection.engine import make_engine
from store.records import Record
from tests.support.shallow import write_shallow

POLICY: Final = "swap"
RECIPE: Final = """
learner = "grpo"
dtype = "float32"
[claim]
max_staleness = 64
[batch]
micro_batch_tokens = 256
[optimizer]
learning_rate = 1e-3
[publish]
tolerance = 0.01
retire_after_s = {retire_after_s}
"""
# Longer than two calls of an episode take: a call is known once it has ended, and counts from when
# it began. A version keeps its slot for so long after its last call.
RETIRE_AFTER_S: Final = 10.0
# The first turn begins once each client has had so many episodes answered by the first version: the
# engine compiles what it meets for the first time.
WARM_UP: Final = 2
LOOK_S: Final = 0.5
JOIN_S: Final = 60.0
Tell = Callable[[str], None]


class Options(Record, frozen=True, kw_only=True):
    """Set how a run is."""

    minutes: float
    loads: int
    streams: int
    layers: int
    slots: int
    retire_after_s: float


class PublisherFailed(Exception):
    """Report that the process that publishes versions has ended with an error."""


async def measure(options: Options, folder: Path, models: Path, tell: Tell) -> Found:
    """Run once; `folder` holds all that the run writes.

    Raises:
        PublisherFailed: see there.
        NotReady, ProcessFailed: the stack cannot run here.
    """
    tell("preparing the model and its adapters")
    model = await asyncio.to_thread(_model, folder, models, options.layers)
    recipe = folder / "swap.toml"
    recipe.write_text(RECIPE.format(retire_after_s=options.retire_after_s))
    made = folder / "prepared"
    probe_s = await asyncio.to_thread(prepare, str(model), str(recipe), made)
    stack_plan = small_plan(folder / "data", str(model), POLICY, str(recipe))
    vllm = msgspec.structs.replace(stack_plan.vllm, adapter_slots=options.slots)
    stack_plan = msgspec.structs.replace(stack_plan, vllm=vllm)
    async with running_stack(stack_plan, lambda names: tell(f"waiting for {names}")) as stack:
        # What it does after an update is done by the publisher.
        await stack.stop_training()
        return await _measure(stack, options, made, probe_s, tell)


def _model(folder: Path, models: Path, layers: int) -> Path:
    """Return the packaged model's first layers, or the whole of it if it has no more."""
    whole = unpacked_model(models)
    (folder / "model").mkdir()
    return write_shallow(whole, folder / "model", layers)


async def _measure(stack: Stack, options: Options, made: Path, probe_s: float, tell: Tell) -> Found:
    place = Place(
        database_url=stack.database_url,
        server_url=f"http://127.0.0.1:{stack.plan.vllm.port}/v1",
        adapter_dir=stack.plan.adapter_dir,
        prepared=made,
        recipe=stack.plan.recipe,
        policy=POLICY,
        slots=options.slots,
        log=stack.plan.log_dir / "publisher.log",
    )
    with running_publisher(place) as publisher:
        async with Clients(stack.base_url, POLICY, options.streams) as clients:
            schedule = await _follow(stack, options, clients, publisher, tell)
            await clients.stop()
        await publisher.until_ended(stack)
    engine = make_engine(stack.database_url)
    try:
        good = {call.id for call in clients.calls if call.why is None}
        stored, retired = await read_ledger(engine, good)
    finally:
        await engine.dispose()
    return figures(
        Run(
            policy=POLICY,
            layers=options.layers,
            streams=options.streams,
            minutes=options.minutes,
            slots=options.slots,
            probe_s=probe_s,
            schedule=schedule,
            calls=clients.calls,
            gaps=clients.gaps,
            events=publisher.events,
            stored=stored,
            retired=retired,
        )
    )


async def _follow(
    stack: Stack, options: Options, clients: Clients, publisher: "Publisher", tell: Tell
) -> Schedule:
    """Warm up, give the publisher its schedule, and wait until the last turn ends."""
    tell("waiting for the first version")
    while not publisher.loads:
        await publisher.look(stack)
    await clients.until_served(publisher.loads[0].version)
    clients.start()
    enough = WARM_UP * CALLS * options.streams
    while len(clients.calls) < enough:
        tell(f"warming up: {enough - len(clients.calls)} more calls")
        await publisher.look(stack)
    schedule = plan(time.monotonic(), options.minutes, options.loads)
    publisher.begin(schedule)
    while (now := time.monotonic()) < schedule.ends:
        turn = int((now - schedule.began) // schedule.turn_s) + 1
        tell(
            f"turn {turn} of {schedule.turns},"
            f" {len(publisher.loads) - 1} of {schedule.loads} loads,"
            f" {len(clients.calls)} calls, {clients.failed} failed"
        )
        await publisher.look(stack)
    return schedule


class Publisher:
    """Follow the process that publishes versions.

    Attributes:
        events: what it told, in its order.
    """

    def __init__(self, here: Connection) -> None:
        self.events: list[Event] = []
        self._here = here
        self._has_ended = False

    @property
    def loads(self) -> list[Load]:
        """Return the loads so far."""
        return [event for event in self.events if isinstance(event, Load)]

    def begin(self, schedule: Schedule) -> None:
        """Let it publish as the schedule says."""
        self._here.send(schedule)

    async def look(self, stack: Stack) -> None:
        """Read what it told, and wait until the next look.

        Raises:
            PublisherFailed: it has ended with an error.
            ProcessFailed: a process of the stack was given up.
        """
        stack.check()
        while not self._has_ended and self._here.poll():
            told = self._here.recv()
            if isinstance(told, str):
                raise PublisherFailed(told)
            if told is None:
                self._has_ended = True
            else:
                self.events.append(told)
        await asyncio.sleep(LOOK_S)

    async def until_ended(self, stack: Stack) -> None:
        """Wait until it has ended."""
        while not self._has_ended:
            await self.look(stack)


@contextmanager
def running_publisher(place: Place) -> Iterator[Publisher]:
    """Run the process that publishes versions until the block is left."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=publish_all, args=(place, there))
    process.start()
    there.close()
    try:
        yield Publisher(here)
    finally:
        process.join(0.0)
        if process.is_alive():
            process.terminate()
        process.join(JOIN_S)
