"""Whatever waits, no key and no task has more of an update's step than its share."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.caps.choosing import Choosing, Past, Sizes
from store.caps.sources import Candidate, GroupMember, Kind, Source, sources_of

NEVER = 1e9


class Waiting(NamedTuple):
    """An episode that waits: its place in the order is that in its list."""

    key: str
    task: str
    has_signal: bool = True


class Backlog:
    """What `store.updates.ready` says of episodes, in memory."""

    def __init__(
        self,
        episodes: Sequence[Waiting],
        caps: Mapping[Kind, float],
        sizes: Sizes,
        *,
        age_s: float = 0.0,
        past: Past | None = None,
    ) -> None:
        self.looks = 0
        self._episodes = list(enumerate(episodes))
        self._caps = caps
        self._sizes = sizes
        self._age_s = age_s
        self._past = past

    async def look(self, full: frozenset[Source]) -> list[Candidate]:
        self.looks += 1
        left = [
            (number, one) for number, one in self._episodes if full.isdisjoint(self._sources(one))
        ]
        size = self._sizes.group_size
        names = [str(number) if size == 1 else one.task for number, one in left]
        groups = [
            [pair for pair, own in zip(left, names, strict=True) if own == name][:size]
            for name in dict.fromkeys(names)
        ]
        found = [
            Candidate(
                name=name,
                has_signal=group[0][1].has_signal,
                age_s=self._age_s,
                members=tuple(GroupMember(UUID(int=n), self._sources(one)) for n, one in group),
            )
            for name, group in zip(dict.fromkeys(names), groups, strict=True)
            if len(group) == size
        ]
        return [
            one
            for kind in (True, False)
            for one in [one for one in found if one.has_signal is kind][: self._sizes.most]
        ]

    def _sources(self, one: Waiting) -> tuple[Source, ...]:
        return sources_of(self._caps, one.key, one.task)

    async def recall(self) -> Past:
        if self._past is not None:
            return self._past
        names = {
            "key": {one.key for _, one in self._episodes},
            "task": {one.task for _, one in self._episodes},
        }
        alone: frozenset[Any] = frozenset(k for k in self._caps if len(names[k]) == 1)
        return Past(lone=alone, trained_s={})

    def choose(self) -> list[Waiting]:
        choosing = Choosing(self._caps, self._sizes, self.look, self.recall)
        chosen = asyncio.run(choosing.choose())
        ids = [member.id.int for group in chosen for member in group.members]
        assert len(ids) == len(set(ids))
        self.groups = sum(group.has_signal for group in chosen) or len(chosen)
        return [self._episodes[number][1] for number in ids]


def sizes(groups: int, group_size: int = 1, most: int | None = None) -> Sizes:
    return Sizes(groups=groups, most=most or groups, group_size=group_size, max_age_s=600.0)


def of(key: str, count: int, task: str | None = None, **fields: Any) -> list[Waiting]:
    return [Waiting(key, task or f"{key}{number}", **fields) for number in range(count)]


def keys(found: Sequence[Waiting]) -> str:
    return "".join(sorted(one.key for one in found))


def test_a_flood_has_its_share_and_others_the_rest() -> None:
    found = Backlog(of("a", 100) + of("b", 3) + of("c", 1), {"key": 0.5}, sizes(8)).choose()
    assert keys(found) == "aaaabbbc"


def test_a_key_that_is_alone_has_all() -> None:
    backlog = Backlog(of("a", 100), {"key": 0.5}, sizes(8))
    assert keys(backlog.choose()) == "a" * 8


def test_a_key_is_not_alone_while_the_last_updates_had_another() -> None:
    past = Past(lone=frozenset(), trained_s={})
    flood, few = of("a", 100), sizes(8)
    assert not Backlog(flood, {"key": 0.5}, few, past=past).choose()
    late = Backlog(flood, {"key": 0.5}, few, past=past, age_s=NEVER)
    assert keys(late.choose()) == "aaaa"


def test_what_is_capped_is_late_only_once_it_was_not_trained_on_for_as_long() -> None:
    def chosen(seconds: float) -> str:
        past = Past(lone=frozenset(), trained_s={Source("key", "a"): seconds})
        waiting = of("a", 100)
        return keys(Backlog(waiting, {"key": 0.5}, sizes(8), past=past, age_s=NEVER).choose())

    assert chosen(599.0) == ""
    assert chosen(600.0) == "aaaa"


def test_another_that_is_late_takes_the_flood_along_at_its_share() -> None:
    past = Past(lone=frozenset(), trained_s={Source("key", "a"): 1.0})
    waiting = of("a", 100) + of("b", 1)
    found = Backlog(waiting, {"key": 0.5}, sizes(8), past=past, age_s=NEVER).choose()
    assert keys(found) == "aaaab"


def test_an_update_of_more_groups_than_a_whole_one_keeps_to_shares_of_itself() -> None:
    few = Backlog(of("a", 100) + of("b", 4), {"key": 0.5}, sizes(4, most=16))
    assert keys(few.choose()) == "aaaabbbb"
    many = Backlog(of("a", 100) + of("b", 30), {"key": 0.5}, sizes(4, most=16))
    assert keys(many.choose()) == "a" * 8 + "b" * 8


def test_who_adds_to_anothers_groups_does_not_keep_them_waiting() -> None:
    owners = "bcdefghi"
    mixed = [Waiting(key, f"t-{owner}") for owner in owners for key in ("a", "a", owner, owner)]
    found = Backlog(mixed, {"key": 0.25}, sizes(8, 2)).choose()
    # Two groups are the flood's; six are formed of what else waits of their tasks.
    assert keys(found) == "aaaa" + "".join(2 * owner for owner in owners[2:])


def test_what_has_no_signal_counts_for_the_same_share() -> None:
    waiting = of("a", 10) + of("b", 4) + of("a", 10, has_signal=False)
    waiting += of("c", 2, has_signal=False)
    assert keys(Backlog(waiting, {"key": 0.5}, sizes(8)).choose()) == "aaaabbbbcc"


def test_a_task_has_its_share_of_single_episodes() -> None:
    waiting = of("a", 9, "t") + of("a", 9)
    found = Backlog(waiting, {"task": 0.25}, sizes(8)).choose()
    assert [one.task for one in found].count("t") == 2


def test_a_look_is_made_again_only_where_a_source_is_full() -> None:
    plenty = Backlog(of("a", 4) + of("b", 4), {"key": 0.5}, sizes(8))
    assert len(plenty.choose()) == 8
    assert plenty.looks == 1
    flooded = Backlog(of("a", 100) + of("b", 4), {"key": 0.5}, sizes(8))
    assert len(flooded.choose()) == 8
    assert flooded.looks == 2


@pytest.mark.parametrize("group_size", [1, 3])
@given(st.data())
def test_no_source_moves_the_policy_by_more_than_its_share(
    group_size: int, data: st.DataObject
) -> None:
    one = st.builds(Waiting, st.sampled_from("abcd"), st.sampled_from("uvwxyz"), st.booleans())
    waiting = data.draw(st.lists(one, max_size=60))
    groups = data.draw(st.integers(min_value=1, max_value=6))
    most = data.draw(st.integers(min_value=groups, max_value=2 * groups))
    share = st.floats(min_value=1 / groups, max_value=0.99) if groups > 1 else st.just(0.99)
    caps: dict[Kind, float] = {"key": data.draw(share)}
    if group_size == 1:
        caps["task"] = data.draw(share)
    past = Past(lone=frozenset(), trained_s={})
    backlog = Backlog(waiting, caps, sizes(groups, group_size, most), age_s=NEVER, past=past)
    found = backlog.choose()
    step = min(1.0, backlog.groups / groups)
    for kind, of_whole in caps.items():
        names = [getattr(taken, kind) for taken in found]
        for name in set(names):
            assert (
                names.count(name) <= group_size
                or names.count(name) * step <= of_whole * len(found) + 1e-6
            )
    # Something is taken wherever something could be, and the same again.
    assert bool(found) == any(
        len([w for w in waiting if w.task == task]) >= group_size
        for task in {w.task for w in waiting}
    ) or (group_size > 1)
    assert backlog.choose() == found
