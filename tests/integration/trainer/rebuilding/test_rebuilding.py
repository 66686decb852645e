"""A line that is rebuilt without some episodes: bit for bit one that never had them."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from msgspec import UNSET
from sqlalchemy import select

from pawl.policies.show import versions_of
from store.deleting.delete import delete_episode
from store.deleting.receipts import Receipt
from store.ids import lowest_id_at
from store.keys import create_key
from store.records import CallRecord
from store.schema.recorded import episodes
from store.updates import claims
from store.version_queries import list_versions
from store.version_states import begin_canary, freeze
from tests.support.records import call, reward
from tests.support.trainer.rebuilding import (
    GATED,
    RECIPES,
    Bench,
    Stand,
    Waves,
    of_episode,
    waves,
    without,
)
from trainer.errors import PublishError, TrainerError
from trainer.publishing.publisher import Publisher

DAY = datetime(2026, 11, 20, tzinfo=UTC)


@pytest.mark.parametrize("rule", RECIPES)
async def test_it_is_bit_for_bit_a_line_that_never_had_them(stand: Stand, rule: str) -> None:
    bench = await stand.bench("rebuilt", RECIPES[rule])
    never = await stand.bench("never", RECIPES[rule])
    made, out = waves(), ["w0/e1", "w0/e2", "w1/e0", "w2/e6"]
    await bench.trains(made)
    before = {number: bench.written(number) for number in (1, 2, 3)}
    result = await bench.rebuild(*out)
    await never.trains([without(records, out) for records in made])

    assert (result.version.served_name, result.version.state) == ("m@6", "serving")
    assert (result.left_out, result.waiting, result.updates) == (4, 0, 3)
    for old, new in ((1, 4), (2, 5), (3, 6)):
        assert bench.written(new) == never.written(old)
        assert bench.written(new) != bench.written(old)
        assert bench.written(old) == before[old]
    assert bench.state(6) == never.state(3) != {}
    baselines = "SELECT baselines FROM updates WHERE version = {}"
    assert await bench.all(baselines.format(6)) == await never.all(baselines.format(3))
    assert bench.told == [(0, 3), (1, 3), (2, 3), (3, 3)]


async def with_key(bench: Bench, made: Waves, out: Sequence[str]) -> dict[str, Any]:
    """Let these episodes have come with one API key: their calls, or of the first the reward."""
    async with bench.engine.begin() as connection:
        key = (await create_key(connection, "stolen", ("infer", "feedback"))).about.id
        other = (await create_key(connection, "other", ("infer", "feedback"))).about.id
    for records in made:
        for at, record in enumerate(records):
            name = of_episode(record)
            came_with = isinstance(record, CallRecord) == (name != out[0])
            own = key if name in out and came_with else other
            records[at] = msgspec.structs.replace(record, api_key=own)
    return {"key": "stolen"}


async def of_a_day(_: Bench, made: Waves, out: Sequence[str]) -> dict[str, Any]:
    """Let these episodes have begun on one day, and all others on the day before or after it."""
    for records in made:
        for at, record in enumerate(records):
            if not isinstance(record, CallRecord):
                continue
            days = 0 if record.episode in out else (-1, 1)[at % 4 == 0]
            began = DAY + timedelta(days=days, hours=1, minutes=at)
            made_id = UUID(int=lowest_id_at(began).int + record.id.int % 2**62)
            records[at] = msgspec.structs.replace(record, id=made_id, started_at=began)
    return {"since": DAY, "before": DAY + timedelta(days=1)}


@pytest.mark.parametrize("selected", [with_key, of_a_day])
async def test_without_what_came_with_a_key_or_of_a_day_it_is_bit_for_bit_a_line_that_never_had_it(
    stand: Stand, selected: Callable[[Bench, Waves, Sequence[str]], Awaitable[dict[str, Any]]]
) -> None:
    bench, never = await stand.bench("rebuilt"), await stand.bench("never")
    made, out = waves(), ["w0/e1", "w0/e2", "w1/e0", "w2/e6"]
    query = await selected(bench, made, out)
    await bench.trains(made)
    result = await bench.rebuild(**query)
    left_out = [name for name, (_, reason) in (await bench.spent()).items() if reason]
    assert (result.left_out, sorted(left_out)) == (4, out)
    await never.trains([without(records, out) for records in made])
    for number in (1, 2, 3):
        assert bench.written(number + 3) == never.written(number) != bench.written(number)
    assert bench.state(6) == never.state(3) != {}


@pytest.mark.parametrize("rule", ["group", "moving"])
async def test_the_new_line_replaces_the_old_one_and_training_goes_on_from_it(
    stand: Stand, rule: str
) -> None:
    bench = await stand.bench("rebuilt", RECIPES[rule])
    never = await stand.bench("never", RECIPES[rule])
    made, out = waves(version=0), ["w0/e1", "w1/e0"]
    await bench.trains(made[:2])
    await bench.rebuild(*out)
    assert await bench.states() == {
        0: "published",
        1: "retired",
        2: "retired",
        3: "rejected",
        4: "serving",
    }
    shown = {line.version: line.rebuilt_from for line in await versions_of(bench.engine, "m")}
    assert (shown["m@2"], shown["m@3"], shown["m@4"]) == (UNSET, "m@1", "m@2")
    assert await bench.train(made[2])
    await never.trains([without(records, out) for records in made])
    # The last wave's first task is filled up with a member of the one before: not the first of it.
    assert bench.written(5) == never.written(3)
    assert bench.state(5) == never.state(3)


async def test_what_is_left_out_stays_spent_and_what_waits_is_never_claimed(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    made = waves()
    await bench.trains(made[:2])
    await bench.store([call("w0/new", task="t/new", policy_version=2), *made[2]])
    result = await bench.rebuild(prefix="w0/")
    assert (result.left_out, result.waiting) == (8, 1)
    spent = await bench.spent()
    assert {spent[f"w0/e{number}"][1] for number in range(8)} == {"left_out"}
    assert spent["w0/e2"][0]
    assert spent["w0/new"] == (False, "left_out")
    assert spent["w1/e0"][1] is None
    await bench.store([reward(1.0, episode="w0/new")])
    assert await bench.train([])
    assert (await bench.spent())["w0/new"] == (False, "left_out")
    # The first update has nothing left, and makes no version.
    assert result.version.version == 3
    assert [row.version for row in await bench.all("SELECT version FROM updates ORDER BY id")] == [
        *(1, 2, None, None, 3, 4)
    ]


async def test_a_line_without_any_signal_left_is_the_base_model(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:1])
    result = await bench.rebuild(prefix="w0/")
    assert (result.version.version, result.version.state) == (0, "serving")
    assert result.retired == ("m@1",)
    assert await bench.states() == {0: "serving", 1: "retired"}


async def test_with_a_gate_it_serves_at_once_and_nothing_of_the_old_line_is_tried(
    stand: Stand,
) -> None:
    bench, never = await stand.bench("rebuilt", GATED), await stand.bench("never")
    made = waves(version=0)
    await bench.trains(made[:1])
    async with bench.engine.begin() as connection:
        [tried] = [v for v in await list_versions(connection, "m") if v.state == "candidate"]
        await begin_canary(connection, tried, 0.1, 0.02, reason="a trial", actor="steward")
    for records in made[1:]:
        assert await bench.train(records)
    before = {0: "serving", 1: "canary", 2: "rejected", 3: "candidate"}
    assert await bench.states() == before
    # Nobody but an operator may move the traffic, which is who asks for a rebuild.
    async with bench.engine.begin() as connection:
        await freeze(connection, "m", frozen=True, reason="wrong rewards", actor="operator")
    result = await bench.rebuild("w1/e1")
    assert (result.version.state, result.retired) == ("serving", ("m@1", "m@3"))
    # The canary was trained on none of it, and stands for itself.
    rebuilt = {0: "published", 1: "retired", 2: "rejected", 3: "rejected", 4: "rejected"}
    assert await bench.states() == {**rebuilt, 5: "serving"}
    await never.trains([without(records, ["w1/e1"]) for records in made])
    assert bench.written(5) == never.written(3)
    ended = "SELECT version, from_state, to_state, actor FROM policy_events WHERE reason = '{}'"
    assert await bench.all(ended.format("rebuilt as m@5 without 1 episodes")) == [
        (1, "canary", "retired", "operator"),
        (3, "candidate", "rejected", "operator"),
    ]
    assert await bench.all("SELECT share FROM policies WHERE version = 0") == [(0.02,)]


async def test_what_is_tried_goes_on_if_the_rebuilt_version_is_rejected(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await stand.bench("rebuilt", GATED)
    await bench.trains(waves(version=0)[:2])

    async def fails(*_: object) -> object:
        raise PublishError("it answers otherwise")

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "_probe", fails)
        with pytest.raises(PublishError, match=r"m@4, which is rebuilt, was rejected"):
            await bench.rebuild("w0/e1")
    states = await bench.states()
    assert (states[0], states[2], states[4]) == ("serving", "candidate", "rejected")
    result = await bench.rebuild("w0/e1")
    assert (result.version.served_name, result.version.state) == ("m@4", "serving")


async def test_versions_before_the_first_loss_stand_for_themselves(stand: Stand) -> None:
    bench, never = await stand.bench("rebuilt"), await stand.bench("never")
    made = waves()
    await bench.trains(made)
    result = await bench.rebuild("w2/e1")
    await never.trains([without(records, ["w2/e1"]) for records in made])
    assert (result.version.version, result.updates) == (4, 1)
    assert bench.written(4) == never.written(3)
    assert bench.state(4) == never.state(3)
    # A second one leaves out what the first did, too.
    again = await bench.rebuild("w1/e1")
    other = await stand.bench("other")
    await other.trains([without(records, ["w1/e1", "w2/e1"]) for records in made])
    assert bench.written(again.version.version) == other.written(3)
    assert again.left_out == 2


async def test_done_twice_it_changes_nothing(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:2])
    first = await bench.rebuild("w0/e1")
    updates = await bench.all("SELECT id FROM updates")
    again = await bench.rebuild("w0/e1")
    assert again.version == first.version
    assert again.retired == ()
    assert await bench.all("SELECT id FROM updates") == updates


async def test_what_was_deleted_is_told_and_left_out_if_that_is_asked_for(stand: Stand) -> None:
    bench, never = await stand.bench("rebuilt"), await stand.bench("never")
    made = waves()
    await bench.trains(made)
    deleted = await delete(bench, "w1/e5")
    assert deleted.trained == ("m@2",)
    with pytest.raises(TrainerError, match=r"1 episodes .* \(1 deleted\).*--leave-out-missing"):
        await bench.rebuild("w0/e1")
    assert (await bench.spent())["w0/e1"][1] is None
    result = await bench.rebuild("w0/e1", leave_missing=True)
    await never.trains([without(records, ["w0/e1", "w1/e5"]) for records in made])
    assert bench.written(result.version.version) == never.written(3)
    # What a rebuilt version was trained on is told like that of any other.
    assert (await delete(bench, "w2/e5")).trained == ("m@3", "m@6")
    assert (await delete(bench, "w0/e1")).trained == ("m@1",)


async def delete(bench: Bench, key: str) -> Receipt:
    async with bench.engine.begin() as connection:
        [whole] = await connection.scalars(select(episodes.c.id).where(episodes.c.key == key))
        receipt = await delete_episode(connection, whole)
    assert receipt is not None
    return receipt


async def test_nothing_of_the_line_is_left_out(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:1])
    await bench.store([call("late", policy_version=1)])
    result = await bench.rebuild("late")
    assert (result.version.served_name, result.version.state) == ("m@1", "serving")
    assert (result.left_out, result.waiting, result.updates) == (0, 1, 0)


async def test_while_a_trainer_works_on_the_policy_it_is_refused(stand: Stand) -> None:
    bench = await stand.bench("rebuilt")
    await bench.trains(waves()[:1])
    async with bench.engine.connect() as guard:
        assert await claims.hold_policy(guard, "m")
        with pytest.raises(TrainerError, match=r"being worked on.*rebuild again"):
            await bench.rebuild("w0/e1")
        await guard.invalidate()
    assert (await bench.spent())["w0/e1"][1] is None
