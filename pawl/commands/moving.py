"""Define `pawl policies promote`, `rollback`, `retrain` and `freeze`: move traffic by hand."""

from typing import TYPE_CHECKING, Annotated

import typer

from pawl.commands.common import OfTenant, with_engine
from pawl.settings import StewardSettings, read_settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pawl.steward.rollback import Loaded
    from store.retraining import Retrained
    from store.versions import PolicyVersion

VersionName = Annotated[
    str, typer.Argument(metavar="NAME[@N]", help="The policy, or a version.", show_default=False)
]
PolicyName = Annotated[str, typer.Argument(help="Name of the policy.", show_default=False)]
Reason = Annotated[str, typer.Option(help="Why, for the policy's events.")]
BY_HAND = "by hand"


def promote(name: VersionName, reason: Reason = BY_HAND, tenant: OfTenant = None) -> None:
    """Give a version the traffic now: by default the one that is tried, or waits to be.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). New episodes begin with
    the version; those under way keep theirs. It must be loaded: its state is `candidate`, `canary`,
    `ready` or `published`. A version that was retired and called back may be on no server yet, and
    is loaded first: run this where the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) and
    the adapters' files can be reached. The next candidate is judged as before; `pawl policies
    freeze` keeps the traffic where it is.

    Status 2: there is no such version, or it cannot serve.
    """
    from pawl.policies.moving import promote_by_hand
    from trainer.publishing.model_server import Replicas

    async def work(engine: "AsyncEngine") -> "PolicyVersion":
        settings = read_settings(StewardSettings)
        async with Replicas(settings.server_urls, settings.adapter_slots) as replicas:
            return await promote_by_hand(engine, replicas, name, reason, tenant)

    chosen = with_engine(work)
    print(f"{chosen.served_name} serves")


def rollback(name: VersionName, reason: Reason = BY_HAND, tenant: OfTenant = None) -> None:
    """Let no new episode begin with a version: by default the one that serves.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). If the version serves,
    the one before it serves again, or the base model. For that it must be loaded: run this where
    the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) and the adapters' files can be
    reached, as for a steward. If it cannot be loaded, the base model serves instead. Episodes under
    way keep their version, and are not trained on. Versions that were trained from it never serve.
    This cannot be undone; the adapter can be exported and imported again.

    Status 2: there is no such version, or it has no new episodes.
    """
    from pawl.policies.moving import roll_back_by_hand
    from trainer.publishing.model_server import Replicas

    async def work(
        engine: "AsyncEngine",
    ) -> "tuple[PolicyVersion, PolicyVersion | None, Loaded | None]":
        settings = read_settings(StewardSettings)
        async with Replicas(settings.server_urls, settings.adapter_slots) as replicas:
            return await roll_back_by_hand(engine, replicas, name, reason, tenant)

    chosen, serves, loaded = with_engine(work)
    print(f"{chosen.served_name} is rolled back")
    if serves is not None:
        print(f"{serves.served_name} serves")
    if serves is not None and loaded is not None and loaded.why_not is not None:
        print(f"{loaded.version.served_name} could not be loaded: {loaded.why_not}")


def retrain(
    name: PolicyName,
    start: Annotated[
        int, typer.Option("--from", min=0, help="Version to start at; 0: the base model.")
    ],
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUERY",
            help="Leave out an episode, by key or id, or those that meet all of FIELD=VALUE,...:"
            " task, prefix, agent, key, since, before, scored-since, scored-before. May be given"
            " several times.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Start a policy's line of versions again at an older version, without some episodes.

    For the day on which rewards turn out to be wrong. The version gets the traffic, and all after
    it end: nothing is trained from them, and they never serve again. The episodes that these
    consumed are free, and the policy's trainer trains the version on them, but for those left out,
    which no update claims any more. Episodes under way keep their version. A trainer may run
    meanwhile: an update under way is given up.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). A version that was
    retired is loaded first: run this where the model servers (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS)
    and the adapters' files can be reached.

    Status 2: there is no such version, episode or key, or the line cannot start at the version.
    """
    from pawl.policies.retraining import as_text, read_without, retrain_by_hand
    from trainer.publishing.model_server import Replicas

    left_out = read_without(without or ())

    async def work(engine: "AsyncEngine") -> "Retrained":
        settings = read_settings(StewardSettings)
        async with Replicas(settings.server_urls, settings.adapter_slots) as replicas:
            return await retrain_by_hand(
                engine, replicas, (name, start), left_out, reason, tenant, dry_run=dry_run
            )

    print(as_text(with_engine(work)))


def freeze(
    name: PolicyName,
    off: Annotated[bool, typer.Option("--off", help="Let the gate decide again.")] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Keep a policy's traffic where it is until `--off`; only commands move it meanwhile.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). A version that is tried
    keeps its share of the new episodes; training goes on.

    Status 2: there is no such policy.
    """
    from pawl.policies.moving import freeze_by_hand

    with_engine(lambda engine: freeze_by_hand(engine, name, reason, tenant, frozen=not off))
    print(f"{name} is {'no longer ' if off else ''}frozen")
