"""Any ledger of training and evaluation: none of evaluation is spent, all of training is.

Calls name their episode or are joined by what they repeat; rewards, claims, ends of updates,
releases and expiry come in between, in any order. Two policies serve the calls of an episode, and
claim it each for itself: alone, or in whole groups of a task, which late members join.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.claims import expire_episodes
from store.errors import ClaimSpoilt
from store.records import Episode, SpoolRecord
from store.values.digests import ACROSS_SPLITS, PREFIX, TOOL_CALL
from store.version_states import ensure_base
from store.write.ingest import Ingester
from tests.support.ledger.any_order import empty
from tests.support.ledger.lineage import add_in_state
from tests.support.ledger.shared_database import SharedDatabase, shared_database
from tests.support.records import call, reward

POLICIES = ("m", "n")
SINGLES = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=1e9)
# A member that comes late is claimed where its task has one that was spent before.
GROUPS = ClaimRule(policy="m", group_size=3, groups=1, max_age_s=0.0, fewest=1)
# Whatever may be claimed is stale for an update of version 1.
IMPATIENT = msgspec.structs.replace(SINGLES, max_staleness=0)
KEYS = [f"e{number}" for number in range(6)]
# The first four are attempts at one task.
TASKS = dict(zip(KEYS, ["t0"] * 4 + ["t1"] * 2, strict=True))
SPLITS = ("train", "train", "eval")

calls = st.tuples(
    st.just("call"),
    st.sampled_from(KEYS),
    st.sampled_from(SPLITS),
    st.sampled_from(["m", "m", "n"]),
    # What its reply told, and what it repeats: an id or words, of a few.
    st.none() | st.tuples(st.sampled_from([TOOL_CALL, PREFIX]), st.integers(0, 2)),
    st.none() | st.tuples(st.sampled_from([TOOL_CALL, PREFIX]), st.integers(0, 2)),
)
rewards = st.tuples(st.just("reward"), st.sampled_from(KEYS))
others = st.tuples(
    st.sampled_from(["claim", "claim", "finish", "finish", "release", "expire"]),
    st.sampled_from(POLICIES),
)
rules = st.sampled_from([SINGLES, GROUPS, GROUPS])
ledgers = st.lists(calls | calls | rewards | others, max_size=24)


def fingerprint(one: tuple[int, int] | None) -> tuple[bytes, ...]:
    return () if one is None else (bytes([one[0]]) + str(one[1]).encode().ljust(15, b"."),)


def record(step: Sequence[Any]) -> SpoolRecord:
    if step[0] == "reward":
        return reward(1.0, episode=step[1])
    _, key, split, policy, told, repeats = step
    return call(
        key,
        method="own",
        split=split,
        task=TASKS.get(key),
        policy=policy,
        provides=fingerprint(told),
        needs=fingerprint(repeats),
    )


def plain(key: str, split: str = "train", policy: str = "m") -> tuple[Any, ...]:
    return ("call", key, split, policy, None, None)


# A group of one task is spent by both policies, one of its members then turns out to be evaluation,
# and another comes late: it is compared with the one that is left.
LATE = [
    *(plain(key, policy=policy) for key in KEYS[:2] for policy in POLICIES),
    *(("reward", key) for key in KEYS[:2]),
    *((step, policy) for policy in POLICIES for step in ("claim", "finish")),
    *(plain(KEYS[0], "eval"), plain(KEYS[2], "eval"), plain(KEYS[3]), plain(KEYS[3], policy="n")),
    *(("reward", key) for key in KEYS[2:4]),
    *((step, policy) for policy in POLICIES for step in ("claim", "finish")),
]
# An episode that an update holds gets a call of evaluation in its other part, and then a second
# provider of the fingerprint that joined the two: they are in doubt, and still one in the update.
SECOND_PROVIDER = ("call", "e5", "train", "n", (1, 2), None)
EVALUATION_CALL = ("call", "e2", "eval", "m", None, None)
JOINED_AND_CLAIMED = [
    ("call", "e0", "train", "m", None, (1, 2)),
    ("call", "e2", "train", "m", (1, 2), None),
    ("reward", "e0"),
    ("claim", "m"),
]
DOUBTED_LAST = [*JOINED_AND_CLAIMED, EVALUATION_CALL, SECOND_PROVIDER, ("finish", "m")]
DOUBTED_FIRST = [*JOINED_AND_CLAIMED, SECOND_PROVIDER, EVALUATION_CALL, ("finish", "m")]
# Nine providers more: the fingerprint is too common, so no link leads from one part to the other.
TOO_COMMON = [
    *JOINED_AND_CLAIMED,
    *(("call", f"more{number}", "train", "n", (1, 2), None) for number in range(9)),
    EVALUATION_CALL,
    ("finish", "m"),
]


class Ledger:
    """A database, and the update of each policy that runs."""

    def __init__(self, engine: AsyncEngine, rule: ClaimRule) -> None:
        self.engine = engine
        self.rule = rule
        self.running: dict[str, UUID] = {}

    async def empty(self) -> None:
        await empty(self.engine, "updates", "policies")
        async with self.engine.begin() as connection:
            for policy in POLICIES:
                await ensure_base(connection, policy)
                await add_in_state(connection, policy, 1, "retired")
        self.running = {}

    async def do(self, step: Sequence[Any]) -> None:
        if step[0] in ("call", "reward"):
            await Ingester().store(self.engine, [record(step)])
            return
        async with self.engine.begin() as connection:
            await getattr(self, step[0])(connection, step[1])
        await self.check_what_is_spent()

    async def claim(self, connection: AsyncConnection, policy: str) -> None:
        if policy in self.running:
            return
        rule = msgspec.structs.replace(self.rule, policy=policy)
        claimed = await claims.claim(connection, rule, 0, {})
        if claimed is None:
            return
        self.running[policy] = claimed
        held = await claims.load_claim(connection, claimed)
        for group in held.groups:
            assert len(group.episodes) + len(group.earlier) <= rule.group_size
            await self.check_none_is_evaluation(connection, [*group.episodes, *group.earlier])

    async def check_none_is_evaluation(
        self, connection: AsyncConnection, members: Sequence[Episode]
    ) -> None:
        """Neither what is claimed nor what it is compared with has a call of evaluation."""
        rows = await connection.execute(
            text(
                "SELECT e.key FROM episodes e JOIN transitions t ON t.episode_id = e.id"
                " WHERE t.split = 'eval' AND COALESCE(e.root, e.id) = ANY(:ids)"
            ),
            {"ids": [one.id for one in members]},
        )
        assert rows.all() == []

    async def finish(self, connection: AsyncConnection, policy: str) -> None:
        if policy not in self.running:
            return
        held = await connection.execute(
            text("SELECT episode_id FROM episode_policies WHERE claimed_by = :update"),
            {"update": self.running[policy]},
        )
        outcomes = [claims.Outcome(episode_id=one, trained=True) for one in held.scalars()]
        nested = await connection.begin_nested()
        try:
            await claims.record_update(
                connection,
                self.running[policy],
                outcomes,
                {},
                policy=policy,
                version=None,
                adapter_path=None,
            )
        except ClaimSpoilt as error:
            if "became evaluation" not in str(error):
                raise
            await nested.rollback()
            await self.release(connection, policy)
        self.running.pop(policy, None)

    async def release(self, connection: AsyncConnection, policy: str) -> None:
        if policy in self.running:
            await claims.release(connection, self.running.pop(policy), "test")

    async def expire(self, connection: AsyncConnection, policy: str) -> None:
        await expire_episodes(connection, msgspec.structs.replace(IMPATIENT, policy=policy), 1, {})

    async def check_what_is_spent(self) -> None:
        """What the last step spent had no call of evaluation, in any of its parts."""
        rows = await self.ask(
            "SELECT e.key FROM consumptions c JOIN episodes w ON w.id = c.episode_id"
            " JOIN episodes e ON e.id = w.id OR e.root = w.id"
            " JOIN transitions t ON t.episode_id = e.id WHERE t.split = 'eval' AND c.seen IS NULL"
        )
        assert rows == []
        async with self.engine.begin() as connection:
            await connection.execute(text("UPDATE consumptions SET seen = true"))

    async def ask(self, query: str) -> list[Any]:
        async with self.engine.connect() as connection:
            return [tuple(row) for row in await connection.execute(text(query))]

    async def spend_the_rest(self) -> None:
        """Train until nothing is left to claim, a lone member of a task in the end as well."""
        for rule in dict.fromkeys((self.rule, SINGLES)):
            self.rule = rule
            for policy in POLICIES:
                await self.spend_all_of(policy)

    async def spend_all_of(self, policy: str) -> None:
        for _ in range(2 * len(KEYS) + 2):
            await self.do(("claim", policy))
            if policy not in self.running:
                return
            await self.do(("finish", policy))
        raise AssertionError("an update is given up again and again")


# What may be trained on by the ledger's own marks: roots and their reasons. An episode is spent
# when every policy that served a call of it, or of what it is joined with, has claimed it.
WHOLES = """
    SELECT e.key, COALESCE(r.quarantined_reason, e.quarantined_reason),
        COALESCE(COALESCE(r.joined_split, r.split), COALESCE(e.joined_split, e.split)),
        NOT EXISTS (
            SELECT FROM transitions t JOIN episodes o ON o.id = t.episode_id
            WHERE COALESCE(o.root, o.id) = COALESCE(r.id, e.id) AND NOT EXISTS (
                SELECT FROM episode_policies p WHERE p.episode_id = COALESCE(r.id, e.id)
                    AND p.policy = t.policy AND p.claimed_by IS NOT NULL)),
        COALESCE(r.scored_at, e.scored_at) IS NOT NULL
    FROM episodes e LEFT JOIN episodes r ON r.id = e.root ORDER BY 1
"""


# Episodes with a part that repeats what evaluation alone was told: never trained on in doubt.
ACROSS_SPLITS = f"""
    WITH needing AS (
        SELECT COALESCE(e.root, e.id) AS whole FROM links JOIN episodes e ON e.id = needed_by
        WHERE level >= {ACROSS_SPLITS})
    SELECT key FROM episodes WHERE COALESCE(root, id) IN (SELECT whole FROM needing)
"""


async def play(
    engine: AsyncEngine, steps: Sequence[Sequence[Any]], rule: ClaimRule = SINGLES
) -> None:
    ledger = Ledger(engine, rule)
    await ledger.empty()
    for step in steps:
        await ledger.do(step)
    await ledger.spend_the_rest()
    everything = await ledger.ask(WHOLES)
    for key, reason, split, spent, scored in everything:
        # Every reward of training that nothing forbids is trained on.
        assert spent or not scored or split == "eval" or reason is not None, key
    across = await ledger.ask(ACROSS_SPLITS)
    await compare_without_evaluation(ledger, steps, everything, {key for (key,) in across})


async def compare_without_evaluation(
    ledger: Ledger, steps: Sequence[Sequence[Any]], before: list[Any], across: set[str]
) -> None:
    """No episode of training is set aside that would not be if evaluation had never been stored.

    Claims and ends of updates are left out of the comparison, for joins depend on what they hold.
    """
    stored = [step for step in steps if step[0] in ("call", "reward")]
    if len(stored) < len(steps):
        return
    await ledger.empty()
    for step in stored:
        if step[0] == "reward" or step[2] == "train":
            await ledger.do(step)
    without = {key: reason for key, reason, *_ in await ledger.ask(WHOLES)}
    for key, reason, split, *_ in before:
        if split == "train" and key not in across:
            assert reason is None or without[key] is not None, key


async def add_marks(engine: AsyncEngine) -> None:
    """Let the test mark which consumptions it has looked at."""
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE consumptions ADD COLUMN seen boolean"))


@pytest.fixture
def marked(database_url: str) -> Iterator[SharedDatabase]:
    """A database for all examples: each empties it first."""
    with shared_database(database_url) as shared:
        shared.run(add_marks(shared.engine))
        yield shared


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=ledgers, rule=rules)
@example(steps=LATE, rule=GROUPS)
@example(steps=DOUBTED_LAST, rule=SINGLES)
@example(steps=DOUBTED_FIRST, rule=SINGLES)
@example(steps=TOO_COMMON, rule=SINGLES)
def test_all_training_and_no_evaluation_episodes_are_consumed(
    marked: SharedDatabase, steps: list[Sequence[Any]], rule: ClaimRule
) -> None:
    marked.run(play(marked.engine, steps, rule))


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(calls | calls | rewards, max_size=24))
def test_evaluation_sets_no_training_episode_aside(
    marked: SharedDatabase, steps: list[Sequence[Any]]
) -> None:
    marked.run(play(marked.engine, steps))
