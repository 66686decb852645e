"""Run the trainer process: start it, and wait while the database or a model server is away."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import perf_counter

import structlog
from prometheus_client import start_http_server
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store.connection.availability import is_unavailable
from store.connection.engine import make_engine
from store.embedded.server import EmbeddedPostgres
from store.errors import ClaimLost
from store.policy_table import open_policies
from store.schema.migrate import upgrade
from store.settings import address
from store.updates import claims
from trainer.chosen import Chosen, chosen_policy
from trainer.credit.air import STEP_WARNING
from trainer.errors import TrainerError, UpstreamAway
from trainer.learners.distributed.several import LeadingLearner, follow, is_follower
from trainer.learners.kernels.memory import keep_freed_memory
from trainer.learners.learner import Learner
from trainer.learners.protocol import LearnerProtocol
from trainer.loop import Loop
from trainer.publishing.publish import Publisher
from trainer.publishing.replicas import Replicas
from trainer.recipes.recipe import Recipe, load_recipe
from trainer.settings import TrainerSettings
from trainer.updates.versions import begin_policy

log = structlog.get_logger()

RETRY_S = 1.0
# The pause after a check of the store is at least this many times as long as the check, so
# that a large backlog does not keep the database busy.
PAUSE_PER_CHECK = 10


async def train(settings: TrainerSettings, *, once: bool = False) -> None:
    """Run the trainer until SIGTERM or SIGINT, or for one update with `once`.

    As one of several processes started by `accelerate launch`, rank 0 does everything but the
    computation alone, and stops the others at the end.

    Raises:
        TrainerError: the recipe, the model or the policy cannot be used.
    """
    # Must come before a second thread starts: only the first arena may be used.
    keep_freed_memory()
    chosen = chosen_policy(settings, open_policies(settings.policies))
    recipe = load_recipe(chosen.recipe)
    if is_follower():
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        await _follow(settings, chosen, recipe)
        return
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    work = asyncio.create_task(_work(settings, chosen, recipe, once=once))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.is_set():
        # A half-done update is abandoned, and its episodes are released (`Loop.update_once`).
        work.cancel()
        await asyncio.wait([work])
    if not work.cancelled():
        work.result()


async def _work(settings: TrainerSettings, chosen: Chosen, recipe: Recipe, *, once: bool) -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Replicas(settings.server_urls))
        policy, model = await _policy_and_model(settings, chosen, server)
        learner = LeadingLearner(await _learner(settings, recipe, model))
        stack.callback(learner.stop)
        host, port = address(settings.trainer_listen)
        httpd, _ = start_http_server(port, host)
        stack.callback(httpd.shutdown)
        log.info("trainer_up", policy=policy, recipe=chosen.recipe)
        if recipe.credit.air_assignment == "step":
            log.warning("air_by_step", why=STEP_WARNING)
        stack.callback(learner.interrupt)
        while True:
            try:
                begin = partial(_begin, settings, recipe, server, learner, policy, chosen.base)
                if await _session(settings, begin, policy, once=once):
                    return
            except Exception as error:
                if not (is_unavailable(error) or isinstance(error, UpstreamAway | ClaimLost)):
                    raise
                log.warning("trainer_waits", reason=f"{type(error).__name__}: {error}"[:200])
            await asyncio.sleep(RETRY_S)


async def _follow(settings: TrainerSettings, chosen: Chosen, recipe: Recipe) -> None:
    async with Replicas([str(settings.upstream_url)]) as server:
        _, model = await _policy_and_model(settings, chosen, server)
    follow(await _learner(settings, recipe, model))


async def _learner(settings: TrainerSettings, recipe: Recipe, model: str) -> Learner:
    return await asyncio.to_thread(Learner, model, recipe, settings.seed, settings.scratch)


async def _policy_and_model(
    settings: TrainerSettings, chosen: Chosen, server: Replicas
) -> tuple[str, str]:
    """Return the policy's name and its base model, from the settings or from the model server."""
    if chosen.policy and settings.model:
        return chosen.policy, settings.model
    while True:
        try:
            listed = await server.models()
            break
        except UpstreamAway as error:
            log.warning("trainer_waits", reason=str(error))
            await asyncio.sleep(RETRY_S)
    bases = [name for name, model in listed.items() if model.get("parent") is None]
    policy = chosen.policy or bases[0]
    base = chosen.base or policy
    if base not in listed:
        where, remedy = (
            ("PAWL_POLICY", "or unset it to train the base model")
            if chosen.base is None
            else (f"{settings.policies}: policy {policy!r}: base", "or serve that model")
        )
        raise TrainerError(
            f"{where} is {base!r}, but the model server serves {', '.join(sorted(listed))}:"
            f" set it to one of these, {remedy}"
        )
    return policy, settings.model or str(listed[base]["root"])


Begin = Callable[[AsyncEngine], Awaitable[Loop]]


async def _session(settings: TrainerSettings, begin: Begin, policy: str, *, once: bool) -> bool:
    """Work for as long as one database connection lives; return True when `once` is done."""
    async with _database(settings) as url:
        await upgrade(url)
        engine = make_engine(url)
        try:
            async with engine.connect() as guard:
                await _hold_policy(guard, policy)
                loop = await begin(engine)
                await _keep_updating(guard, loop, settings.poll_s, once=once)
                return True
        finally:
            await engine.dispose()


async def _begin(
    settings: TrainerSettings,
    recipe: Recipe,
    server: Replicas,
    learner: LearnerProtocol,
    policy: str,
    base: str | None,
    engine: AsyncEngine,
) -> Loop:
    """Return the policy's loop, once its base is known and what a killed trainer left is ended.

    Raises:
        TrainerError: the policy began with another base model.
    """
    await begin_policy(engine, policy, base, settings.policies)
    publisher = Publisher(engine, server, policy, recipe.publish)
    loop = Loop(settings, recipe, engine, publisher, learner, policy)
    await loop.recover()
    return loop


async def _keep_updating(guard: AsyncConnection, loop: Loop, poll_s: float, *, once: bool) -> None:
    """Run one update after the other; return after the first with `once`."""
    while True:
        await claims.still_connected(guard)
        await loop.sync_adapters()
        started = perf_counter()
        updated = await loop.update_once()
        if updated and once:
            return
        if not updated:
            check_s = perf_counter() - started
            await asyncio.sleep(max(poll_s, PAUSE_PER_CHECK * check_s))


@asynccontextmanager
async def _database(settings: TrainerSettings) -> AsyncIterator[str]:
    """Yield the URL of the configured or the embedded database, which nobody stops meanwhile."""
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    postgres = EmbeddedPostgres(settings.data_dir)
    try:
        yield await asyncio.to_thread(postgres.ensure_running)
    finally:
        await asyncio.to_thread(postgres.leave)


async def _hold_policy(guard: AsyncConnection, policy: str) -> None:
    """Lock the policy for as long as this connection lives; wait while another trainer holds it."""
    waited = False
    while not await claims.hold_policy(guard, policy):
        if not waited:
            log.warning("trainer_waits", reason=f"another trainer works on policy {policy}")
        waited = True
        await asyncio.sleep(RETRY_S)
