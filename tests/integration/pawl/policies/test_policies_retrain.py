"""`pawl policies retrain`: what a query selects, and what the command refuses."""

import msgspec
import pytest
from click.testing import Result
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.operator_moves import BadQuery
from store.claim_query import ClaimRule
from store.errors import UnknownNames, UnknownPolicy
from store.keys import create_key, revoke_key
from store.records import SpoolRecord
from store.version_states import ensure_base
from tests.integration.conftest import Pawl
from tests.support.ledger.episodes import ingest
from tests.support.ledger.lineage import promote
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward
from trainer.recipes.recipe import Recipe

RULE = ClaimRule(policy="m", group_size=2, groups=2, max_age_s=1e9)


@pytest.fixture
async def run(engine: AsyncEngine, pawl: Pawl, monkeypatch: pytest.MonkeyPatch) -> Pawl:
    """`pawl policies retrain`, for a policy `m` with two updates of four episodes, and one free."""
    for version in (1, 2):
        await fill(engine, version)
    async with engine.begin() as connection:
        await ingest(connection, [call("free", task="free", agent="judge")])
    monkeypatch.setenv("PAWL_UPSTREAM_URL", "http://127.0.0.1:9/v1")

    async def invoke(*arguments: str) -> Result:
        return await pawl("policies", "retrain", *arguments)

    return invoke


async def fill(engine: AsyncEngine, version: int) -> None:
    records: list[SpoolRecord] = []
    for number in range(4):
        key = f"u{version}/e{number}"
        records.append(call(key, task=f"t{version}{number % 2}", policy_version=version - 1))
        records.append(reward(number / 2, at=100 * version, episode=key))
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await ingest(connection, records)
    claim = await claimed(engine, RULE, version - 1, Recipe().model_dump(mode="json"))
    assert claim is not None
    await consume_all(engine, claim, version=version)
    async with engine.begin() as connection:
        await promote(connection, "m", version)


async def left_out(run: Pawl, *queries: str) -> int:
    """How many episodes a retraining from the base model would leave out."""
    asked = [word for query in queries for word in ("--without", query)]
    result = await run("m", "--from", "0", *asked, "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        "m would serve in place of m@2; versions ended: 2; episodes freed: 8"
    )
    return int(result.stdout.rpartition("left out: ")[2])


@pytest.mark.parametrize(
    ("queries", "number"),
    [
        ("u1/e0", 1),
        ("prefix=u1/", 4),
        ("prefix=u", 8),
        ("task=t20", 2),
        ("task=t20,prefix=u1/", 0),
        ("agent=default", 8),
        ("agent=judge", 1),
        ("since=2000-01-01", 9),
        ("before=2000-01-01", 0),
        ("before=2100-01-01,prefix=u2/", 4),
        ("scored-since=2026-01-01T12:03:00+00:00", 4),
        ("scored-before=2026-01-01T12:03:00+00:00", 4),
        ("scored-since=2026-01-01T12:02:00Z,scored-before=2026-01-01T12:03:00Z", 0),
        ("u1/e0 u1/e0 task=t20 agent=judge", 4),
    ],
)
async def test_retrain_queries_select_the_union_of_their_episodes(
    run: Pawl, queries: str, number: int
) -> None:
    assert await left_out(run, *queries.split()) == number


async def test_query_by_api_key_selects_episodes_by_the_keys_name_or_id(
    run: Pawl, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        keys = [await create_key(connection, name, ("infer", "feedback")) for name in ("a", "b")]
        await revoke_key(connection, "a")
        again = await create_key(connection, "a", ("infer",))
        of_other = await create_key(connection, "theirs", ("infer",), tenant="t")
        calls = {"u1/e0": keys[0], "u1/e1": again, "u2/e0": keys[1]}
        records: list[SpoolRecord] = [
            call(episode, api_key=key.about.id) for episode, key in calls.items()
        ]
        stated = reward(0.0, at=1000, episode="u2/e1")
        records.append(msgspec.structs.replace(stated, api_key=keys[1].about.id))
        await ingest(connection, records)
    counts = {"key=a": 2, f"key={again.about.id}": 1, "key=b": 2, "key=b,prefix=u1/": 0}
    assert {query: await left_out(run, query) for query in counts} == counts
    for unknown in ("c", "theirs", of_other.about.id):
        result = await run("m", "--from", "0", "--without", f"key={unknown}", "--dry-run")
        assert isinstance(result.exception, UnknownNames)
        assert repr(unknown) in str(result.exception)


async def test_retrain_starts_the_line_again_from_an_earlier_version(run: Pawl, pawl: Pawl) -> None:
    result = await run("m", "--from", "1", "--without", "u2/e0", "--reason", "a fooled judge")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "m@1 serves in place of m@2; versions ended: 1; episodes freed: 4 trained; episodes left"
        " out: 1\n"
    )
    show = await pawl("policies", "show", "m", "--json")
    assert next(line for line in show.stdout.splitlines() if '"ended":true' in line).startswith(
        '{"version":"m@2","state":"retired"'
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("m", "--from", "0", "--without", "e9"), UnknownNames, "not recorded, .*e9"),
        (("m", "--from", "0", "--without", "since=x"), BadQuery, "'x' is no time"),
        (("n", "--from", "0"), UnknownPolicy, "there is no policy 'n'"),
        (("m", "--from", "7"), UnknownPolicy, "no version 7"),
    ],
)
async def test_refused_retraining_changes_nothing(
    run: Pawl, arguments: tuple[str, ...], error: type[Exception], message: str
) -> None:
    result = await run(*arguments)
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception
    assert await left_out(run, "u1/e0") == 1
