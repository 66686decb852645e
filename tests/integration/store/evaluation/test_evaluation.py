"""Episodes of evaluation: never trained on, whoever says so and however late."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from store import claims
from store.claim_query import ClaimRule
from store.claims import Claim, end_unusable_claim, expire_episodes
from store.errors import ClaimSpoilt
from store.link.joins import TOO_LATE
from store.read.evaluations import Evaluation, rewards_by_version
from store.records import CallRecord, Episode
from store.values.digests import PREFIX, TOOL_CALL
from store.values.intervals import student_interval, wilson_interval
from store.version_states import ensure_base
from tests.support.ledger.episodes import episodes, store
from tests.support.ledger.lineage import add_in_state
from tests.support.ledger.updates import claimed, consume_all
from tests.support.records import call, reward

PATIENT = 1e9
SINGLE = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=PATIENT)
PAIRS = ClaimRule(policy="m", group_size=2, groups=1, max_age_s=PATIENT)
LOST: Any = {"http_status": 400, "trainable": False, "reason": "incomplete"}
LONG_AGO = datetime.now(UTC) - timedelta(days=3)


def said(name: str, kind: int = PREFIX) -> bytes:
    """What a reply told its client, as a fingerprint."""
    return bytes([kind]) + name.encode().ljust(15, b".")


def own(key: str, split: str = "train", **changes: Any) -> CallRecord:
    """A call that names no episode."""
    return call(key, method="own", split=split, **changes)


async def take(engine: AsyncEngine, rule: ClaimRule = SINGLE) -> Claim | None:
    return await claimed(engine, rule)


def keys(claim: Claim | None) -> set[str]:
    return {e.key for group in claim.groups for e in group.episodes} if claim else set()


async def release(engine: AsyncEngine, claim: Claim) -> None:
    async with engine.begin() as connection:
        await claims.release(connection, claim.update_id, "test")


async def by_key(engine: AsyncEngine) -> dict[str, Episode]:
    return {episode.key: episode for episode in await episodes(engine)}


async def curve(engine: AsyncEngine, policy: str | None = None) -> list[Evaluation]:
    async with engine.connect() as connection:
        return await rewards_by_version(connection, policy)


# Claims and expiry


async def test_an_episode_of_evaluation_is_never_claimed(engine: AsyncEngine) -> None:
    await store(engine, call("e", split="eval"), reward(1.0, episode="e"))
    assert await take(engine) is None
    await store(engine, call("t"), reward(1.0, episode="t"))
    assert keys(await take(engine)) == {"t"}


@pytest.mark.parametrize("turned", [False, True])
async def test_one_evaluation_call_of_several_makes_its_episode_evaluation(
    engine: AsyncEngine, turned: bool
) -> None:
    calls = [call("e"), call("e", split="eval"), call("e")]
    for record in reversed(calls) if turned else calls:
        await store(engine, record)
    await store(engine, reward(1.0, episode="e"))
    assert (await by_key(engine))["e"].split == "eval"
    assert await take(engine) is None


async def test_evaluation_episode_fills_no_training_group(engine: AsyncEngine) -> None:
    await store(engine, call("t1", task="q"), reward(1.0, episode="t1"))
    await store(engine, call("e", task="q", split="eval"), reward(0.0, episode="e"))
    assert await take(engine, PAIRS) is None
    await store(engine, call("t2", task="q"), reward(0.0, episode="t2"))
    assert keys(await take(engine, PAIRS)) == {"t1", "t2"}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (LOST, {"failed_after_s": 0}),
        ({}, {"call_rewards_after_s": 0}),
    ],
)
async def test_neither_failure_nor_call_rewards_make_evaluation_claimable(
    engine: AsyncEngine, changes: Any, rule: Any
) -> None:
    for split in ("eval", "train"):
        record = call(split, split=split, started_at=LONG_AGO, **changes)
        await store(engine, record)
        if not changes:
            await store(engine, reward(1.0, call=str(record.id)))
    ready = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=PATIENT, **rule)
    assert keys(await take(engine, ready)) == {"train"}


async def test_a_failed_joined_episode_of_evaluation_is_not_claimed(engine: AsyncEngine) -> None:
    told = said("1")
    await store(engine, own("e", "eval", provides=(told,), started_at=LONG_AGO))
    await store(engine, own("f", "eval", needs=(told,), started_at=LONG_AGO, **LOST))
    ready = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=PATIENT, failed_after_s=0)
    assert await take(engine, ready) is None


async def test_evaluation_episode_does_not_expire_as_stale(engine: AsyncEngine) -> None:
    await store(engine, call("eval", split="eval"), call("train", split="train"))
    rule = ClaimRule(policy="m", group_size=1, groups=1, max_age_s=PATIENT, max_staleness=0)
    async with engine.begin() as connection:
        await ensure_base(connection, "m")
        await add_in_state(connection, "m", 1, "retired")
        assert await expire_episodes(connection, rule, 1, {}) == {"stale": 1}
    query = text("SELECT key FROM consumptions JOIN episodes ON id = episode_id")
    async with engine.connect() as connection:
        assert list((await connection.execute(query)).scalars()) == ["train"]


async def test_consumed_episode_that_became_evaluation_is_not_compared_with(
    engine: AsyncEngine,
) -> None:
    short = ClaimRule(policy="m", group_size=4, groups=1, max_age_s=1e-6, fewest=1)
    for key in ("a", "b"):
        await store(engine, call(key, task="q"), reward(1.0, episode=key))
    first = await take(engine, short)
    assert first is not None
    await consume_all(engine, first)
    await store(engine, call("a", task="q", split="eval"))
    await store(engine, call("c", task="q"), reward(0.0, episode="c"))
    second = await take(engine, short)
    assert second is not None
    [group] = second.groups
    assert [e.key for e in group.earlier] == ["b"]


# Said after the claim


async def test_episode_that_becomes_evaluation_under_a_claim_is_not_consumed(
    engine: AsyncEngine,
) -> None:
    for key in ("a", "b"):
        await store(engine, call(key, task="q"), reward(1.0, episode=key))
    claim = await take(engine, PAIRS)
    assert claim is not None
    await store(engine, call("a", task="q", split="eval"))
    with pytest.raises(ClaimSpoilt, match=r"1 episodes of update .* became evaluation .*'a'"):
        await consume_all(engine, claim)
    await release(engine, claim)
    assert keys(await take(engine)) == {"b"}


async def test_evaluation_call_that_continues_a_claimed_episode_spoils_the_claim(
    engine: AsyncEngine,
) -> None:
    told = said("id", TOOL_CALL)
    await store(engine, own("a", provides=(told,)), reward(1.0, episode="a"))
    claim = await take(engine)
    assert claim is not None
    await store(engine, own("e", "eval", needs=(told,)))
    assert (await by_key(engine))["e"].quarantined_reason == TOO_LATE
    with pytest.raises(ClaimSpoilt, match=r"1 episodes of update .* became evaluation"):
        await consume_all(engine, claim)
    await release(engine, claim)
    assert await take(engine) is None


async def test_late_evaluation_call_keeps_a_consumed_episode_out_of_the_curve(
    engine: AsyncEngine,
) -> None:
    await store(engine, call("a"), reward(1.0, episode="a"))
    claim = await take(engine)
    assert claim is not None
    await consume_all(engine, claim)
    await store(engine, call("a", split="eval"))
    found = (await by_key(engine))["a"]
    assert (found.split, len(found.calls)) == ("eval", 2)
    assert await take(engine) is None
    # It was trained on, so it evaluates nothing.
    assert await curve(engine) == []


async def test_a_damaged_episode_of_evaluation_is_set_aside_unspent(engine: AsyncEngine) -> None:
    for key in ("a", "b"):
        await store(engine, call(key, task="q"), reward(1.0, episode=key))
    claim = await take(engine, PAIRS)
    assert claim is not None
    await store(engine, call("a", task="q", split="eval"))
    blamed = {e.id: "test" for group in claim.groups for e in group.episodes}
    async with engine.begin() as connection:
        assert await end_unusable_claim(connection, claim.update_id, blamed) == 1


# Joins


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("first", "second"), [("eval", "train"), ("train", "eval")])
async def test_episode_joined_by_a_tool_call_id_across_splits_is_evaluation(
    engine: AsyncEngine, first: str, second: str, turned: bool
) -> None:
    told = said("id", TOOL_CALL)
    records = [own("a", first, provides=(told,)), own("b", second, needs=(told,))]
    for record in reversed(records) if turned else records:
        await store(engine, record)
    await store(engine, reward(1.0, episode="a"))
    [(key, whole)] = (await by_key(engine)).items()
    assert (key, whole.split, whole.aliases) == ("a", "eval", ("b",))
    assert await take(engine) is None


@pytest.mark.parametrize("turned", [False, True])
async def test_training_call_that_continues_an_evaluation_reply_joins_its_episode(
    engine: AsyncEngine, turned: bool
) -> None:
    told = said("hello")
    records = [own("e", "eval", provides=(told,)), own("b", needs=(told,))]
    for record in reversed(records) if turned else records:
        await store(engine, record)
    await store(engine, reward(1.0, episode="e"))
    assert [e.split for e in (await by_key(engine)).values()] == ["eval"]
    assert await take(engine) is None


@pytest.mark.parametrize("turned", [False, True])
async def test_evaluation_call_that_repeats_a_training_reply_leaves_its_episode_claimable(
    engine: AsyncEngine, turned: bool
) -> None:
    told = said("hello")
    records = [own("t", provides=(told,)), own("e", "eval", needs=(told,))]
    for record in reversed(records) if turned else records:
        await store(engine, record)
    await store(engine, reward(1.0, episode="t"), reward(1.0, episode="e"))
    assert {key: e.split for key, e in (await by_key(engine)).items()} == {
        "t": "train",
        "e": "eval",
    }
    assert keys(await take(engine)) == {"t"}


async def test_equal_evaluation_replies_do_not_make_a_training_join_doubtful(
    engine: AsyncEngine,
) -> None:
    told = said("hello")
    await store(engine, *(own(f"e{n}", "eval", provides=(told,)) for n in range(20)))
    await store(engine, own("t", provides=(told,)), own("t2", needs=(told,)))
    await store(engine, *(own(f"f{n}", "eval", needs=(told,)) for n in range(3)))
    await store(engine, reward(1.0, episode="t"))
    claim = await take(engine)
    assert claim is not None
    [whole] = claim.groups[0].episodes
    assert (whole.key, whole.aliases) == ("t", ("t2",))


async def test_undone_join_with_an_evaluation_makes_the_training_episode_claimable_again(
    engine: AsyncEngine,
) -> None:
    told = said("hello")
    await store(engine, own("e", "eval", provides=(told,)), own("b", needs=(told,)))
    await store(engine, reward(1.0, episode="b"))
    assert await take(engine) is None
    # The call of its own split, which came later, is what it continues.
    await store(engine, own("a", provides=(told,)))
    claim = await take(engine)
    assert claim is not None
    [whole] = claim.groups[0].episodes
    assert {whole.key, *whole.aliases} == {"a", "b"}


# The curve


async def test_rewards_of_0_and_1_have_wilsons_interval(engine: AsyncEngine) -> None:
    for number in range(10):
        key = f"e{number}"
        await store(engine, call(key, split="eval", policy_version=3, task=key))
        await store(engine, reward(float(number < 7), episode=key))
    await store(engine, call("unscored", split="eval", policy_version=3), call("t"))
    [point] = await curve(engine)
    interval = wilson_interval(0.7, 10)
    assert (point.policy, point.version, point.episodes, point.scored) == ("m", 3, 11, 10)
    assert (point.mean, point.low, point.high) == pytest.approx((0.7, *interval))


async def test_mean_of_rewards_other_than_0_and_1_has_students_interval(
    engine: AsyncEngine,
) -> None:
    for key, value in (("a", 0.5), ("b", 1.0), ("c", -0.5)):
        await store(engine, call(key, split="eval", task=key), reward(value, episode=key))
    [point] = await curve(engine, "m")
    interval = student_interval(1 / 3, 0.763762615825973, 3)
    assert interval is not None
    assert (point.mean, point.low, point.high) == pytest.approx((1 / 3, *interval))
    assert await curve(engine, "other") == []


@pytest.mark.parametrize(("right", "alone"), [((8, 0), (1, 0)), ((8, 8), (1, 1))])
async def test_repeated_equal_attempts_at_a_task_do_not_narrow_the_interval(
    engine: AsyncEngine, right: tuple[int, ...], alone: tuple[int, ...]
) -> None:
    async def limits(attempts: int, ends: tuple[int, ...], policy: str) -> tuple[Any, Any]:
        for task, succeeded in enumerate(ends):
            for number in range(attempts):
                key, task_name = f"{policy}{task}.{number}", f"{policy}{task}"
                value = reward(float(number < succeeded), episode=key)
                made = call(key, split="eval", task=task_name, policy=policy)
                await store(engine, made, value)
        [point] = await curve(engine, policy)
        return point.low, point.high

    many, few = await limits(8, right, "many"), await limits(1, alone, "few")
    assert many[0] <= few[0] + 1e-9
    assert many[1] >= few[1] - 1e-9


async def test_mean_of_one_reward_that_is_not_0_or_1_has_no_interval(engine: AsyncEngine) -> None:
    await store(engine, call("a", split="eval"), reward(0.5, episode="a"))
    [point] = await curve(engine)
    assert (point.mean, point.low, point.high) == (0.5, None, None)


async def test_the_newest_reward_of_an_episode_counts(engine: AsyncEngine) -> None:
    record = own("a", "eval", response_id="r")
    await store(engine, record, reward(1.0, episode="a", at=1), reward(0.0, response="r", at=2))
    await store(engine, reward(1.0, episode="a", at=0))
    assert [point.mean for point in await curve(engine)] == [0.0]


async def test_mean_of_call_rewards_counts_if_the_episode_has_no_reward(
    engine: AsyncEngine,
) -> None:
    calls = [call("a", split="eval"), call("a", split="eval")]
    await store(engine, *calls)
    for record, value in zip(calls, (0.0, 0.5), strict=True):
        await store(engine, reward(value, call=str(record.id)))
    assert [point.mean for point in await curve(engine)] == [0.25]
    await store(engine, reward(1.0, episode="a"))
    assert [point.mean for point in await curve(engine)] == [1.0]


async def test_an_episode_counts_for_each_policy_by_the_version_of_its_first_call(
    engine: AsyncEngine,
) -> None:
    await store(
        engine,
        call("a", split="eval", policy="outside", policy_version=None),
        call("a", split="eval", policy="writer", policy_version=2),
        call("a", split="eval", policy="checker", policy_version=5),
        call("a", split="eval", policy="writer", policy_version=3),
        reward(1.0, episode="a"),
    )
    found = [(point.policy, point.version, point.mean) for point in await curve(engine)]
    assert found == [("checker", 5, 1.0), ("writer", 2, 1.0)]


async def test_joined_parts_count_as_a_single_episode_in_the_curve(engine: AsyncEngine) -> None:
    told = said("1")
    await store(engine, own("a", "eval", provides=(told,)), own("b", "eval", needs=(told,)))
    await store(engine, reward(1.0, episode="b"))
    [point] = await curve(engine)
    assert (point.episodes, point.scored, point.mean) == (1, 1, 1.0)


async def test_rewards_that_are_too_large_to_be_squared_are_no_error(engine: AsyncEngine) -> None:
    for key, value in (("a", 1.7e308), ("b", 1.7e308), ("c", -1.7e308)):
        await store(engine, call(key, split="eval"), reward(value, episode=key))
    [point] = await curve(engine)
    assert point.mean == pytest.approx(1e15 / 3)


async def test_training_episodes_have_a_reward_curve_by_version(engine: AsyncEngine) -> None:
    work = [("a", 0, 0.0), ("b", 1, 1.0), ("c", 1, 0.5)]
    for key, version, value in work:
        await store(engine, call(key, policy_version=version), reward(value, episode=key))
    await store(engine, call("a", policy_version=2), call("unscored", policy_version=1))
    await store(engine, call("asked", split="eval", policy_version=1), reward(1.0, episode="asked"))
    await store(engine, call("asked", policy="other"), call("c", policy="other", policy_version=7))
    async with engine.connect() as connection:
        worked = await rewards_by_version(connection, split="train")
    assert [(p.policy, p.version, p.episodes, p.scored, p.mean) for p in worked] == [
        ("m", 0, 1, 1, 0.0),
        ("m", 1, 3, 2, 0.75),
        ("other", 7, 1, 1, 0.5),
    ]
