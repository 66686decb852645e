"""What a run of killed processes while versions are tried is judged by."""

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean
from uuid import uuid4

import pytest

from benchmarks.chaos.canaries.ledger import changes, wrong_events
from benchmarks.chaos.canaries.recipe import BAD, BASE, CYCLE, GOOD, NOISE, TURNS_AFTER, Worth
from store.versions import PolicyEvent, PolicyState, PolicyVersion

Change = tuple[int, PolicyState | None, PolicyState]
SOUND: Sequence[Change] = (
    (0, None, "serving"),
    (1, None, "written"),
    (1, "written", "candidate"),
    (1, "candidate", "canary"),
    (0, "serving", "published"),
    (1, "canary", "serving"),
)


def event(change: Change, reason: str = "because") -> PolicyEvent:
    version, before, after = change
    return PolicyEvent(
        id=uuid4(),
        name="m",
        version=version,
        from_state=before,
        to_state=after,
        reason=reason,
        actor="steward",
        evidence=None,
        at=datetime.now(UTC),
    )


def version(number: int, state: PolicyState) -> PolicyVersion:
    return PolicyVersion(
        name="m",
        version=number,
        state=state,
        served_name=f"m@{number}",
        adapter_path=None,
        update_id=None,
    )


NOW = (version(0, "published"), version(1, "serving"))


def test_changes_that_follow_each_other_are_right() -> None:
    assert wrong_events(map(event, SOUND), NOW) == []
    assert changes(map(event, SOUND))["None → written"] == 1


@pytest.mark.parametrize(
    ("changed", "states", "said"),
    [
        ((*SOUND, SOUND[-1]), NOW, "where it was serving"),
        (SOUND[:2] + SOUND[3:], NOW, "where it was written"),
        ((*SOUND, (1, "serving", "serving")), NOW, "no change, or no reason"),
        (SOUND[:-1], NOW, "its events end at canary"),
        ((*SOUND, (0, "published", "serving")), NOW, "its events end at serving"),
        (
            (*SOUND, (0, "published", "serving")),
            (version(0, "serving"), version(1, "serving")),
            "2 versions serve",
        ),
    ],
)
def test_a_change_that_is_missing_or_made_twice_is_found(
    changed: Sequence[Change], states: Sequence[PolicyVersion], said: str
) -> None:
    assert any(said in one for one in wrong_events(map(event, changed), states))


def test_a_change_needs_a_reason() -> None:
    [first, *rest] = SOUND
    wrong = wrong_events([event(first, reason=""), *map(event, rest)], NOW)
    assert wrong == ["0: None → serving by steward: no change, or no reason"]


def test_one_version_of_five_is_bad_and_one_turns_bad() -> None:
    worth = Worth(1)
    early = [fmean(worth.of(version) for _ in range(TURNS_AFTER)) for version in range(CYCLE + 1)]
    late = [fmean(worth.of(version) for _ in range(TURNS_AFTER)) for version in range(CYCLE + 1)]
    assert early == pytest.approx([BASE, GOOD, BAD, GOOD, GOOD, GOOD], abs=NOISE / 2)
    assert late == pytest.approx([BASE, GOOD, BAD, BAD, GOOD, GOOD], abs=NOISE / 2)
