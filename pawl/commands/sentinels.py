"""Define `pawl sentinels …`: choose episodes to be scored again, and see whether a judge drifts."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from pawl.commands.common import OfTenant, a_tenant, fail, in_database, with_engine
from pawl.commands.flags import takes
from pawl.settings import JudgeSettings, read_settings
from store.records import Record
from store.tenants import DEFAULT, bare, scoped, tenant_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

    from store.judge.rounds import Round, Watched

Result = TypeVar("Result")

app = typer.Typer(
    no_args_is_help=True,
    help="Choose episodes that a judge scores again and again, and see whether it drifts.",
)

OfJudge = Annotated[
    str, typer.Option("--judge", help="Name of the judge, as in `pawl judge --name`.")
]
Whose = Annotated[
    str, typer.Option("--tenant", callback=a_tenant, help="Whose judge and episodes they are.")
]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[EPISODE]...", help="Keys or ids of episodes.", show_default=False),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON lines on a terminal too, not a table.")
]


class AddFlags(Record, frozen=True, kw_only=True):
    """Hold what may be written after `pawl sentinels add`."""

    judge: OfJudge
    names: Names = None
    sample: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            help="Instead of names: number of episodes to take from those that the judge scored, "
            "evenly over the range of its scores.",
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**31 - 1,
            help="With --sample: random seed of the choice among similar scores.",
        ),
    ] = 0
    policy: Annotated[
        str | None, typer.Option(help="With --sample: only episodes with calls of this policy.")
    ] = None
    metric: Annotated[
        str, typer.Option(help="Metric of the judge's answers whose value is compared.")
    ] = "reward"
    references: Annotated[
        int,
        typer.Option(
            min=1,
            max=4,
            help="Number of first rounds whose scores are the reference for later ones.",
        ),
    ] = 3
    tenant: Whose = DEFAULT


@app.command()
@takes(AddFlags)
def add(flags: AddFlags) -> None:
    """Make episodes sentinels of a judge, from its next round on.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). The running `pawl
    judge` of this name scores them every --sentinels-every seconds, or `pawl judge
    --sentinels-once` does. No score of a sentinel is a reward. An episode that is deleted or
    outdated is no longer a sentinel. Episodes that are sentinels of the judge already stay as they
    are.

    Status 2: an episode is not recorded, or cannot be read back; nothing is added then.
    """
    from pawl.judging.sentinels.drift import fewest

    if bool(flags.names) == (flags.sample is not None):
        fail(
            "the episodes must be either named or drawn: give names, or --sample for some of those"
            " that the judge scored; one of both"
        )
    new, number = _done(lambda: with_engine(lambda engine: _add(engine, flags)))
    print(
        f"{new} sentinels added, {number} in all: the next {flags.references} rounds are their"
        " reference"
    )
    enough = fewest(flags.references, read_settings(JudgeSettings).judge_drift_evidence)
    if number < enough:
        print(
            f"{number} sentinels are too few for any drift to be shown: add some until there are "
            f"{enough} at least; 20 or more tell of smaller ones",
            file=sys.stderr,
        )


async def _add(engine: "AsyncEngine", flags: AddFlags) -> tuple[int, int]:
    """Return how many sentinels were added, and how many the judge has by now."""
    from pawl.judging.sentinels import choosing
    from store.judge.sentinels import sentinels_of

    judge = scoped(flags.tenant, flags.judge)
    choice = choosing.Choice(
        names=tuple(flags.names or ()),
        number=flags.sample or 0,
        seed=flags.seed,
        metric=flags.metric,
        policy=flags.policy,
    )
    new = await choosing.add(engine, judge, choice, flags.references)
    async with engine.connect() as connection:
        return new, len(await sentinels_of(connection, judge))


@app.command("list")
def list_all(
    judge: Annotated[
        str | None, typer.Option(help="Only sentinels of judges of this name; default: of all.")
    ] = None,
    tenant: OfTenant = None,
    as_json: AsJson = False,
) -> None:
    """List sentinels: the reference of each, and what its judge said last.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it. `changed`: the episode went on, or something else that the judge would see is new, and
    it is not asked any more; `pawl sentinels renew` takes it as it is now.
    """
    from pawl.judging.sentinels.tables import sentinels_table
    from pawl.output import write_lines
    from store.judge.sentinels import list_sentinels

    kept = scoped(tenant, judge) if tenant and judge else None
    listed = in_database(lambda connection: list_sentinels(connection, kept))
    lines = [one for one in listed if tenant in (None, one.tenant) and judge in (None, one.judge)]
    write_lines(lines, sentinels_table, as_json=as_json)


@app.command()
def remove(
    judge: OfJudge,
    names: Names = None,
    whole: Annotated[bool, typer.Option("--all", help="Instead of names: all of them.")] = False,
    tenant: Whose = DEFAULT,
) -> None:
    """Remove sentinels of a judge, with what they were scored; the episodes stay.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR).

    Status 2: an episode is not recorded, and nothing is removed; or there was nothing to remove.
    """
    from pawl.judging.sentinels.choosing import named_ids
    from store.judge.sentinels import remove_sentinels

    if bool(names) == whole:
        fail(
            "it is not clear which sentinels to remove: name their episodes, or say --all; one of"
            " both"
        )
    kept = scoped(tenant, judge)

    async def work(connection: "AsyncConnection") -> int:
        ids = await named_ids(connection, kept, names) if names else None
        return await remove_sentinels(connection, kept, ids)

    if not (number := _done(lambda: in_database(work))):
        _fail_without(kept)
    print(f"{number} sentinels removed")


@app.command()
def renew(judge: OfJudge, tenant: Whose = DEFAULT) -> None:
    """Accept a judge as it is now: its next rounds are the new reference.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR). Sentinels whose
    episodes have changed are scored again, as they are now. What was scored before is compared
    with no more; the figures of its rounds stay.

    Status 2: an episode cannot be read back, or there is no sentinel; nothing is renewed then.
    """
    from pawl.judging.sentinels.choosing import take_new_references

    kept = scoped(tenant, judge)
    number = _done(lambda: in_database(lambda one: take_new_references(one, kept)))
    if not number:
        _fail_without(kept)
    print(f"{number} sentinels get new references")


@app.command()
def show(
    judge: OfJudge,
    most: Annotated[int, typer.Option(min=1, help="Number of rounds to show, the newest.")] = 20,
    tenant: Whose = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show the results of a judge's rounds, newest last, and whether the judge has drifted.

    Needs the database (DATABASE_URL, or the embedded one in PAWL_DATA_DIR); nothing is changed
    in it. `mean` and `mean_absolute` are of the differences between a sentinel's score and the
    mean of its references. `gone` counts sentinels that were there a round before: their episodes
    were deleted or outdated, or they were removed. Standard error says whether the judge has
    drifted, by the last round since its renewal that could show it.

    Status 2: no judge of this name has, or had, sentinels. Status 3: the judge has drifted, as of
    that round.
    """
    from pawl.judging.sentinels.tables import rounds_table, verdict_in_words
    from pawl.output import write_lines
    from store.judge.rounds import rounds, watched

    kept = scoped(tenant, judge)

    async def work(connection: "AsyncConnection") -> "tuple[list[Round], list[Watched]]":
        return await rounds(connection, kept, most), await watched(connection, kept)

    shown, known = in_database(work)
    if not shown and not known:
        _fail_without(kept)
    write_lines(shown[::-1], rounds_table, as_json=as_json)
    verdict = verdict_in_words(known[0]) if known else "the judge has no sentinels any more"
    print(verdict, file=sys.stderr)
    if known and known[0].drifted:
        raise SystemExit(3)


def _done(work: Callable[[], Result]) -> Result:
    """Run `work`, or end with status 2 if it cannot be done."""
    from pawl.judging.errors import JudgeError

    try:
        return work()
    except JudgeError as error:
        fail(str(error))


def _fail_without(judge: str) -> NoReturn:
    """End with status 2, as a judge has no sentinels of what was asked for."""
    fail(
        f"judge {bare(judge)!r} of tenant {tenant_of(judge)!r} has no such sentinels: `pawl "
        "sentinels list` shows which judges have any, and --tenant says whose judge is meant"
    )
