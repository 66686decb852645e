"""Ask all parts of a system for facts at once; that a part is away is a fact, too.

Nothing is changed; no database is started or migrated. Every question has a time limit, so that the
facts take seconds even if parts are away.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

import aiohttp
import msgspec
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pawl.doctor.facts import NOTHING, Disk, Facts, PolicyFacts, ProcessAnswer, Ready, ReplicaAnswer
from pawl.operator_moves import approval_event
from pawl.processes import spinning_variables
from pawl.settings import DoctorSettings
from pawl.stack.preflight import GIB
from proxy.errors import BadUpstreams
from proxy.ingester.removing import LETTER_SUFFIX, LETTERS_FOLDER
from proxy.upstreams.upstreams import check_upstreams
from store.adapter_slots import count_live_versions, versions_kept_for_episodes
from store.claim_query import waiting_updates
from store.database import database_time, explain_error, is_too_slow, make_engine
from store.embedded import EmbeddedPostgres
from store.errors import BadPolicies, StoreError
from store.limited_bodies import LimitedResponse
from store.link.claimable import count_missing_rewards
from store.policy_table import PolicyTable, open_policies
from store.read.agreement import agreement_by_judge
from store.read.gates import read_gated_policy
from store.read.health import (
    BegunPolicy,
    CallCount,
    begun_policies,
    count_newest_calls,
    count_unmatched_feedback,
    episode_counts,
    recently_changed_versions,
)
from store.version_queries import list_servable
from trainer.errors import RecipeError
from trainer.publishing.model_server import ModelServer
from trainer.publishing.pacing import slots_named_in
from trainer.recipes.recipe import load_recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.training_warnings import training_warnings

# Time limits for a process, and for all questions to the database.
PROCESS_S: Final = 2.0
STORE_S: Final = 4.0
# A version that changed a moment ago may still be on its way to the servers.
SETTLED: Final = timedelta(minutes=1)
UNAUTHORIZED: Final = (401, 403)

T = TypeVar("T")


async def collect_facts(
    settings: DoctorSettings, engine: AsyncEngine | None, tenant: str | None
) -> Facts:
    """Return the facts of all parts, which are asked concurrently."""
    unusable, table = _read_files(settings)
    async with aiohttp.ClientSession(response_class=LimitedResponse) as session:
        facts, proxy, trainer, controller, servers, (disks, letters) = await asyncio.gather(
            _stored_facts(settings, engine, tenant, table),
            _ask_process(session, settings.admin_listen, settings.headers),
            _ask_process(session, settings.trainer_listen, NOTHING),
            _ask_process(session, settings.controller_listen, NOTHING),
            asyncio.gather(
                *(_ask_server(url, settings.adapter_slots) for url in settings.model_servers)
            ),
            asyncio.to_thread(_read_disks, settings),
        )
    return replace(
        facts,
        proxy=proxy,
        trainer=trainer,
        controller=controller,
        unusable={**unusable, **facts.unusable},
        servers=tuple(servers),
        disks=disks,
        letters=0 if tenant is not None else letters,
        spinning=spinning_variables(os.environ),
    )


def _read_files(settings: DoctorSettings) -> tuple[dict[str, str], PolicyTable | None]:
    """Return the errors of files that settings name, by setting, and the PAWL_POLICIES table."""
    unusable, table = dict[str, str](), None
    try:
        table = open_policies(settings.policies)
    except BadPolicies as error:
        unusable["PAWL_POLICIES"] = str(error)
    try:
        check_upstreams(settings)
    except (BadUpstreams, OSError) as error:
        unusable["PAWL_UPSTREAMS"] = str(error)
    return unusable, table


# Processes


async def _ask_process(
    session: aiohttp.ClientSession, address: str, headers: Mapping[str, str]
) -> ProcessAnswer:
    """Return the `/metrics` of a process, and its `/readyz` if it has that."""

    async def ask(path: str) -> tuple[int, str]:
        async with session.get(f"http://{address}{path}", headers=headers) as reply:
            return reply.status, await reply.text()

    async def ask_all() -> ProcessAnswer:
        status, page = await ask("/metrics")
        if status not in (200, *UNAUTHORIZED):
            return ProcessAnswer(address=address, why_not=f"{status} {page:.200}")
        ready_status, ready = await ask("/readyz")
        families = text_string_to_metric_families(page) if status == 200 else ()
        return ProcessAnswer(
            address=address,
            asks_key=status in UNAUTHORIZED,
            ready=Ready() if ready_status == 404 else msgspec.json.decode(ready, type=Ready),
            samples=tuple(sample for family in families for sample in family.samples),
        )

    return await _within(
        PROCESS_S, ask_all, lambda why: ProcessAnswer(address=address, why_not=why)
    )


async def _ask_server(url: str, slots: int | None) -> ReplicaAnswer:
    """Return the models that a model server lists, and how many adapter slots it has."""
    async with ModelServer(url) as server:

        async def ask() -> ReplicaAnswer:
            models, metrics = await asyncio.gather(server.models(), server.metrics())
            return ReplicaAnswer(
                url=server.url, models=models, slots=slots or slots_named_in(metrics)
            )

        return await _within(PROCESS_S, ask, lambda why: ReplicaAnswer(url=server.url, why_not=why))


async def _within(
    seconds: float,
    ask: Callable[[], Awaitable[T]],
    fallback: Callable[[str], T],
) -> T:
    """Return the answer of `ask`, or `fallback(reason)` if it fails or takes too long."""
    try:
        async with asyncio.timeout(seconds):
            return await ask()
    except TimeoutError:
        return fallback(f"no answer within {seconds:g} s")
    except Exception as error:
        # Any failure is a fact to report.
        return fallback(str(error) or type(error).__name__)


def _read_disks(settings: DoctorSettings) -> tuple[tuple[Disk, ...], int]:
    """Return the disks of Pawl's folders on this machine, and the number of dead letters."""
    folders = {"PAWL_SPOOL_DIR": settings.spool_dir, "PAWL_ADAPTER_DIR": settings.adapter_dir}
    if settings.database_url is None:
        folders["PAWL_DATA_DIR"] = settings.data_dir
    disks, letters = dict[int, Disk](), 0
    for setting, folder in folders.items():
        try:
            place = next(
                one for one in (folder.resolve(), *folder.resolve().parents) if one.exists()
            )
            free = shutil.disk_usage(place).free / GIB
            disk = Disk(setting=setting, folder=str(folder), free_gib=free)
            disks.setdefault(os.stat(place).st_dev, disk)
        except (OSError, RuntimeError):
            # Such as another user's folder; the process that uses it reports what is wrong.
            continue
    with suppress(OSError):
        letters = sum(1 for _ in (settings.spool_dir / LETTERS_FOLDER).glob(f"*{LETTER_SUFFIX}"))
    return tuple(disks.values()), letters


# The database


async def _stored_facts(
    settings: DoctorSettings,
    engine: AsyncEngine | None,
    tenant: str | None,
    table: PolicyTable | None,
) -> Facts:
    """Return the facts that the database gives in time, or why it gives none."""
    nothing = Facts(now=datetime.now(UTC), data_url=f"http://{settings.listen}", tenant=tenant)
    facts = nothing
    try:
        async with asyncio.timeout(STORE_S), _engine(settings, engine) as opened:
            async for more in _read_facts(opened, settings, nothing, table):
                facts = more
    except Exception as error:
        timed_out = isinstance(error, TimeoutError)
        is_late = is_too_slow(error) or isinstance(error, PoolTimeout)
        if is_late or (timed_out and facts is not nothing):
            return replace(facts, is_late=True)
        # Any failure is a fact to report.
        why_not = f"no answer within {STORE_S:g} s" if timed_out else explain_error(error)
        return replace(nothing, database=why_not)
    return facts


@asynccontextmanager
async def _engine(
    settings: DoctorSettings, engine: AsyncEngine | None
) -> AsyncIterator[AsyncEngine]:
    """Yield `engine`, or an engine of the settings' database, which is not started or migrated.

    Raises:
        StoreError: the embedded server does not run.
    """
    if engine is not None:
        yield engine
        return
    if settings.database_url is not None:
        url = settings.database_url.get_secret_value()
    else:
        embedded = await asyncio.to_thread(EmbeddedPostgres, settings.data_dir)
        embedded.check_initialised()
        if embedded.pid is None:
            raise StoreError(f"the embedded PostgreSQL in {settings.data_dir} does not run")
        url = embedded.url
    own = make_engine(url, pool_size=1, limit_s=STORE_S)
    try:
        yield own
    finally:
        await own.dispose()


async def _read_facts(
    engine: AsyncEngine, settings: DoctorSettings, facts: Facts, table: PolicyTable | None
) -> AsyncIterator[Facts]:
    """Yield growing facts from the database: before the first policy, and after each policy."""
    now, tenant = await database_time(engine), facts.tenant
    trained = [] if table is None else [spec for spec in table.specs if spec.trained]
    known = None if table is None else [spec.name for spec in trained]
    async with engine.connect() as connection:
        calls = await count_newest_calls(connection, now, tenant)
        begun = await begun_policies(connection, tenant)
        names = {about.name for about in begun}
        unbegun = [
            spec.name
            for spec in trained
            if spec.name not in names and tenant in (None, spec.tenant)
        ]
        facts = replace(
            facts,
            now=now,
            calls=tuple(calls),
            unmatched=await count_unmatched_feedback(connection, tenant),
            unbegun=tuple(unbegun),
        )
        yield facts
        for about in _policies_to_train(begun, known, settings.policy, calls):
            spec = None if table is None else table.policy_named(about.name)
            try:
                recipe = load_recipe((spec and spec.recipe) or settings.recipe)
            except RecipeError as error:
                facts = replace(facts, unusable={"PAWL_RECIPE": str(error)})
                recipe = None
            policy = PolicyFacts(about=about, recipe=recipe)
            policy = await _read_policy(connection, settings, policy, now, known)
            facts = replace(facts, policies=(*facts.policies, policy))
            yield facts


def _policies_to_train(
    begun: Sequence[BegunPolicy],
    known: Sequence[str] | None,
    chosen: str | None,
    calls: Sequence[CallCount],
) -> list[BegunPolicy]:
    """Return the policies to train: those of the file, or without a file, those in use.

    Without a file, every model that was ever trained is a policy: those that are no longer called,
    trained or named by the settings are left out, unless that leaves none.
    """
    if known is not None:
        return [about for about in begun if about.name in known]
    used = {one.policy for one in calls} | {chosen}
    return [about for about in begun if about.is_held or about.name in used] or list(begun)


async def _read_policy(
    connection: AsyncConnection,
    settings: DoctorSettings,
    policy: PolicyFacts,
    now: datetime,
    known: Sequence[str] | None,
) -> PolicyFacts:
    """Add the database's facts to a policy's; `known` are the policies of the file."""
    name, recipe = policy.name, policy.recipe
    rule = None if recipe is None else claim_rule(recipe, name)
    standing = await read_gated_policy(connection, name)
    tried = standing and (standing.canary or standing.candidate)
    unsettled = await recently_changed_versions(connection, name, SETTLED)
    servable = [
        version
        for version in await list_servable(connection, name)
        if version.version > 0 and version.served_name not in unsettled
    ]
    facts = replace(
        policy,
        rule=rule,
        counts=await episode_counts(
            connection,
            name,
            now,
            calls_are_paid=rule is not None and rule.call_rewards_after_s is not None,
        ),
        lacks=await count_missing_rewards(connection, name),
        judges=tuple(await agreement_by_judge(connection, name)),
        standing=standing,
        waits=None if not tried else await approval_event(connection, tried.version),
        live=await count_live_versions(connection, name, known=known),
        kept=tuple(await versions_kept_for_episodes(connection, name)),
        # Fetched versions are in another folder on each machine.
        servable=tuple(
            replace(one, adapter_path=None) if settings.adapter_source else one for one in servable
        ),
    )
    if rule is None:
        return facts
    return replace(
        facts,
        updates=await waiting_updates(connection, rule),
        problems=await training_warnings(connection, name),
    )
