"""Run the trainer process: start it, and wait while the database or a model server is away."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.ext.asyncio import AsyncEngine

from store.admin_port import serve_app
from store.database import is_unavailable, make_engine
from store.embedded import EmbeddedPostgres
from store.metrics import show_version
from store.policy_table import open_policies
from store.schema.migrate import upgrade
from trainer.errors import NotFetched, ShortOfMemory, TrainerError, UpstreamAway
from trainer.learners.distributed import Leader, follow, has_several_processes, is_follower
from trainer.learners.kernels.process import give_freed_memory_back, keep_freed_memory
from trainer.learners.learner import Learner
from trainer.learners.model import Base, may_fit
from trainer.learners.protocol import LearnerProtocol
from trainer.loop import Loop
from trainer.metrics import show_pause
from trainer.policies import ChosenPolicy, chosen_policies, load_recipes
from trainer.publishing.model_server import Replicas
from trainer.publishing.sources import is_http, serve_files, trainer_files
from trainer.recipes.recipe import Recipe
from trainer.scheduler import PolicyScheduler, PolicyWorker
from trainer.settings import TrainerSettings
from trainer.trackers import Trackers
from trainer.updates.circuit_breaker import TEST_S, CircuitBreaker
from trainer.updates.versions import apply_rules, begin_policy

log = structlog.get_logger()

RETRY_S = 1.0


async def train(settings: TrainerSettings, *, once: bool = False) -> None:
    """Run the trainer until SIGTERM or SIGINT, or for one update with `once`.

    With several processes (`accelerate launch`) all compute; rank 0 alone does everything else, and
    stops the others at the end.

    Raises:
        TrainerError: a recipe, the model or a policy cannot be used.
    """
    # Must come before a second thread starts: only malloc's first arena may be used.
    keep_freed_memory()
    chosen = chosen_policies(settings, open_policies(settings.policies))
    recipes = load_recipes(chosen)
    if is_follower():
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        await _run_follower(settings, chosen, recipes)
        return
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    work = asyncio.create_task(_run_trainer(settings, chosen, recipes, once=once))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.is_set():
        # A half-done update is abandoned, and its episodes are released (`Loop.update_once`).
        work.cancel()
        await asyncio.wait([work])
    if not work.cancelled():
        work.result()


async def _run_trainer(
    settings: TrainerSettings,
    chosen: Sequence[ChosenPolicy],
    recipes: Sequence[Recipe],
    *,
    once: bool,
) -> None:
    async with AsyncExitStack() as stack:
        replicas = Replicas(settings.server_urls, settings.adapter_slots, trainer_files(settings))
        servers = await stack.enter_async_context(replicas)
        policies, model = await _policies_and_model(settings, chosen, servers)
        by_policy = {n: r.model_dump(mode="json") for n, r in zip(policies, recipes, strict=True)}
        trackers = Trackers(settings.trackers, settings.tracking_dir, by_policy)
        stack.callback(trackers.close)
        show_version()
        # Serve versions' files at once: loading the model takes minutes.
        is_up, is_ready = asyncio.Event(), asyncio.Event()
        # Processes that fetch versions use the host of PAWL_ADAPTER_SOURCE.
        hosts = (*settings.allowed_hosts, str(urlsplit(settings.adapter_source or "").hostname))
        app = port_app(settings, is_up, is_ready)
        port = await serve_app(app, settings.trainer_listen, "PAWL_TRAINER_LISTEN", hosts)
        stack.push_async_callback(port.cleanup)
        leader = Leader(await _load_learners(settings, policies, recipes, model))
        stack.callback(leader.stop_followers)
        is_up.set()
        breakers = {policy: CircuitBreaker() for policy in policies}
        workers = [
            _make_worker(
                settings,
                choice,
                recipe,
                servers,
                leader.learners[policy],
                policy,
                breakers[policy],
                trackers,
            )
            for choice, recipe, policy in zip(chosen, recipes, policies, strict=True)
        ]
        stack.callback(leader.interrupt)
        while True:
            try:
                await _run_session(settings, workers, is_ready, once=once)
                return
            except Exception as error:
                if not (is_unavailable(error) or isinstance(error, UpstreamAway)):
                    raise
                log.warning("trainer_waits", reason=f"{type(error).__name__}: {error}"[:200])
                if isinstance(error, UpstreamAway) and not isinstance(error, NotFetched):
                    for policy, breaker in breakers.items():
                        breaker.pause_until_test(
                            "the model servers were away, and may have been replaced"
                        )
                        show_pause(policy, breaker.reason)
            await asyncio.sleep(RETRY_S)


def port_app(
    settings: TrainerSettings, is_up: asyncio.Event, is_ready: asyncio.Event
) -> web.Application:
    """Return the application of the trainer's port.

    It serves `/metrics` once the model is loaded, `/readyz` once the model servers are tested, and
    versions' files if PAWL_ADAPTER_SOURCE is HTTP.
    """

    async def metrics(_: web.Request) -> web.Response:
        if not is_up.is_set():
            raise web.HTTPServiceUnavailable(text="the model is being loaded")
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def readyz(_: web.Request) -> web.Response:
        # An object, as on the other ports: the doctor reads it.
        return web.json_response({}, status=200 if is_ready.is_set() else 503)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/readyz", readyz)
    if settings.adapter_source is not None and is_http(settings.adapter_source):
        serve_files(app, settings.adapter_dir)
    return app


async def _run_follower(
    settings: TrainerSettings, chosen: Sequence[ChosenPolicy], recipes: Sequence[Recipe]
) -> None:
    async with Replicas([str(settings.upstream_url)]) as servers:
        policies, model = await _policies_and_model(settings, chosen, servers)
    follow(await _load_learners(settings, policies, recipes, model))


async def _load_learners(
    settings: TrainerSettings, policies: Sequence[str], recipes: Sequence[Recipe], model: str
) -> dict[str, Learner]:
    """Load the base model once, and return each policy's learner on it.

    If memory is short, wait: other processes may free some.

    Raises:
        LearnerError: the model cannot be loaded, or is larger than all of the memory.
    """

    def load() -> dict[str, Learner]:
        base = Base(model, recipes[0])
        return {
            policy: Learner(base, recipe, settings.seed, settings.scratch)
            for policy, recipe in zip(policies, recipes, strict=True)
        }

    while True:
        try:
            return await asyncio.to_thread(load)
        except ShortOfMemory as error:
            # The trainer's other processes wait in the middle of loading: all must be restarted.
            if has_several_processes() or not may_fit(model, recipes[0]):
                raise
            log.error("trainer_waits", reason=str(error), again_in_s=TEST_S)
        # Outside the except block, where the traceback would keep the loaded parts in memory.
        gc.collect()
        give_freed_memory_back()
        await asyncio.sleep(TEST_S)


async def _policies_and_model(
    settings: TrainerSettings, chosen: Sequence[ChosenPolicy], servers: Replicas
) -> tuple[list[str], str]:
    """Return the policies' names and their base model, from the settings or the model server."""
    named = [policy.policy for policy in chosen if policy.policy]
    if named and settings.model:
        return named, settings.model
    while True:
        try:
            listed = await servers.models()
            break
        except UpstreamAway as error:
            log.warning("trainer_waits", reason=str(error))
            await asyncio.sleep(RETRY_S)
    named = named or [next(n for n, model in listed.items() if model.get("parent") is None)]
    base = chosen[0].base or named[0]
    if base not in listed:
        where, remedy = (
            ("PAWL_POLICY", "or unset it to train the base model")
            if chosen[0].base is None
            else (f"{settings.policies}: policy {named[0]!r}: base", "or serve that model")
        )
        raise TrainerError(
            f"{where} is {base!r}, but the model server serves {', '.join(sorted(listed))}:"
            f" set it to one of these, {remedy}"
        )
    return named, settings.model or str(listed[base]["root"])


def _make_worker(
    settings: TrainerSettings,
    chosen: ChosenPolicy,
    recipe: Recipe,
    servers: Replicas,
    learner: LearnerProtocol,
    policy: str,
    breaker: CircuitBreaker,
    trackers: Trackers,
) -> PolicyWorker:
    """Return the worker of a policy, and log its start."""
    is_checked = False

    async def begin(engine: AsyncEngine) -> Loop:
        """Record the base model, end the update of a killed trainer, and return the loop.

        The first time, the model servers are tested before anything is claimed.
        """
        nonlocal is_checked
        await begin_policy(engine, policy, chosen.base, settings.policies, chosen.tenant)
        await apply_rules(engine, policy, recipe, chosen.together)
        known = chosen.known or (policy,)
        loop = Loop(
            settings,
            recipe,
            engine,
            servers,
            learner,
            policy,
            together=chosen.together,
            known=known,
            breaker=breaker,
            trackers=trackers,
        )
        if not is_checked:
            # First, so that the killed update's episodes do not wait for a server to answer.
            await loop.finish_killed()
            await loop.check_server()
            is_checked = True
        await loop.recover()
        return loop

    log.info("trainer_up", policy=policy, recipe=chosen.recipe)
    return PolicyWorker(policy, begin)


async def _run_session(
    settings: TrainerSettings,
    workers: Sequence[PolicyWorker],
    is_ready: asyncio.Event,
    *,
    once: bool,
) -> None:
    """Run updates until the database connection is lost, or a single update with `once`."""
    async with _database(settings) as url:
        await upgrade(url)
        engine = make_engine(url)
        try:
            async with engine.connect() as guard:
                scheduler = PolicyScheduler(workers, guard, engine, is_ready)
                await scheduler.run(settings.poll_s, once=once)
        finally:
            await engine.dispose()


@asynccontextmanager
async def _database(settings: TrainerSettings) -> AsyncIterator[str]:
    """Yield the URL of the configured or the embedded database."""
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value()
        return
    postgres = EmbeddedPostgres(settings.data_dir)
    try:
        yield await asyncio.to_thread(postgres.ensure_running)
    finally:
        await asyncio.to_thread(postgres.stop)
