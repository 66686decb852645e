"""`pawl policies promote`, `rollback`, `retrain` and `freeze`: move traffic by hand."""

import asyncio
import sys
from typing import Annotated, Final

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import OfTenant, PolicyName, in_transaction, run_with_engine
from pawl.operator_moves import (
    describe_retrained,
    find_to_promote,
    freeze_by_hand,
    promote_by_hand,
    read_query,
    retrain_by_hand,
    roll_back_by_hand,
)
from pawl.settings import ControllerSettings, read_settings
from store.errors import WrongVersionState
from store.versions import PolicyVersion
from trainer.errors import UpstreamAway
from trainer.publishing.model_server import ModelServer, Replicas

VersionName = Annotated[
    str, typer.Argument(metavar="NAME[@N]", help="The policy, or a version.", show_default=False)
]
Reason = Annotated[str, typer.Option(help="Why, for the policy's events.")]
BY_HAND: Final = "by hand"
# How long to wait for a recalled version, and the pause between requests to the model servers.
LOADED_WITHIN_S: Final = 60.0
ASKED_EVERY_S: Final = 0.5


def promote(
    name: VersionName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Give a version the traffic now: by default the canary, or else a loaded version.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). New episodes begin with
    the version; those under way keep theirs. If the version waits for approval, the evidence is
    shown, and on a terminal you are asked to confirm. A version that was unloaded is loaded by the
    controller or the trainer first: run this where the model servers (PAWL_UPSTREAM_URL,
    PAWL_REPLICA_URLS) answer.
    The next version is judged as before; `pawl policies freeze` keeps the traffic where it is.

    Status 1: the answer was no. Status 2: there is no such version, or it cannot serve, or serves
    already.
    """

    async def run(engine: AsyncEngine) -> PolicyVersion:
        async with engine.connect() as connection:
            version, waits = await find_to_promote(connection, name, tenant)
        if waits is not None:
            shown = msgspec.json.encode(waits.evidence).decode()
            print(f"{waits.name}@{waits.version}: {waits.reason}\n{shown}")
            if not yes and sys.stdin.isatty():
                typer.confirm(f"Promote {version.served_name}?", abort=True)
        evidence = None if waits is None else waits.evidence
        return await promote_by_hand(
            engine, version, reason, evidence, wait_until_loaded=wait_until_loaded
        )

    print(f"{run_with_engine(run).served_name} serves")


def rollback(name: VersionName, reason: Reason = BY_HAND, tenant: OfTenant = None) -> None:
    """Roll back a version, by default the serving one: no new episode begins with it.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). If the version serves,
    its control serves again, which is always loaded, and all that served since the control is
    rolled back with it; without a control, the version that served before and is loaded, or the
    base model, serves again.
    Episodes under way keep their version, and are not trained on. Versions that were trained from
    it never serve. This cannot be undone; the adapter can be exported and imported again.

    Status 2: there is no such version, it is neither loaded, a canary nor serving, or it is the
    base model.
    """
    chosen, serves = in_transaction(
        lambda connection: roll_back_by_hand(connection, name, reason, tenant)
    )
    print(f"{chosen.served_name} is rolled back")
    if serves is not None:
        print(f"{serves.served_name} serves")


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
    it end: nothing is trained from them, and they never serve again. The episodes that the ended
    versions consumed can be trained on again, from the older version; the episodes left out are
    never claimed again. Episodes under way keep their version. A trainer may run meanwhile: an
    update under way is given up.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). A version that was
    unloaded is loaded by the controller or the trainer first: run this where the model servers
    (PAWL_UPSTREAM_URL, PAWL_REPLICA_URLS) answer.

    Status 2: there is no such version, episode or key, or the line cannot start at the version.
    """
    left_out = [read_query(query) for query in without or ()]
    retrained = run_with_engine(
        lambda engine: retrain_by_hand(
            engine,
            name,
            start,
            left_out,
            reason,
            tenant,
            dry_run=dry_run,
            wait_until_loaded=wait_until_loaded,
        )
    )
    print(describe_retrained(retrained, dry=dry_run))


def freeze(
    name: PolicyName,
    off: Annotated[bool, typer.Option("--off", help="Let the controller decide again.")] = False,
    reason: Reason = BY_HAND,
    tenant: OfTenant = None,
) -> None:
    """Keep a policy's traffic where it is until `--off`; only commands move it meanwhile.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). A version that is tried
    keeps its share of the new episodes; training goes on.

    Status 2: there is no such policy.
    """
    in_transaction(
        lambda connection: freeze_by_hand(connection, name, reason, tenant, frozen=not off)
    )
    print(f"{name} is {'no longer ' if off else ''}frozen")


async def wait_until_loaded(version: PolicyVersion) -> None:
    """Wait until every replica that answers lists a recalled version.

    Raises:
        WrongVersionState: the version is not listed within `LOADED_WITHIN_S` seconds.
    """
    name = version.served_name
    print(f"{name} was unloaded: waiting for the model servers to load it", file=sys.stderr)
    clock = asyncio.get_running_loop().time
    until, why = clock() + LOADED_WITHIN_S, ""
    async with Replicas(read_settings(ControllerSettings).server_urls) as replicas:
        while clock() < until:
            try:
                listed = await replicas.ask(ModelServer.models)
            except UpstreamAway as error:
                why = str(error)
            else:
                lacking = [server.url for server, models in listed.items() if name not in models]
                if not lacking:
                    return
                why = f"{', '.join(lacking)} has not loaded it"
            await asyncio.sleep(ASKED_EVERY_S)
    raise WrongVersionState(
        f"{name} was not loaded within {LOADED_WITHIN_S:g} s, so it does not serve: {why}; let a"
        " `pawl controller` run, which loads it, see its log, and run this again"
    )
