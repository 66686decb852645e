"""Read what the ledger says of a run: each change of a state once, and each episode's arm."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks.chaos.ledger import kept
from store.connection.engine import make_engine
from store.read.events import list_events
from store.version_queries import list_versions
from store.versions import PolicyEvent, PolicyState, PolicyVersion

MOST: Final = 1_000_000
WITHOUT_ARM: Final = text(
    "SELECT count(*) FROM transitions t JOIN episodes e ON e.id = t.episode_id"
    " WHERE t.policy = :policy AND t.arm IS NULL AND COALESCE(e.joined_split, e.split) = 'train'"
)
SCORED: Final = text("SELECT count(*) FROM episodes WHERE key = ANY(:keys) AND reward IS NOT NULL")
# Versions that had an episode each: more than one where it had to leave, or changed without need.
CHANGED: Final = text("""
    SELECT count(*) FROM (SELECT episode_id FROM transitions WHERE policy = :policy
        GROUP BY episode_id HAVING count(DISTINCT policy_version) > 1) AS several
""")
IS_TRIED: Final = text(
    "SELECT EXISTS (SELECT FROM policies WHERE name = :policy AND state = 'canary')"
)


def wrong_events(events: Iterable[PolicyEvent], versions: Sequence[PolicyVersion]) -> list[str]:
    """Return what is wrong with the changes of states, oldest first, and the states they led to.

    Each begins where the one before it ended, has a reason, and changes something; the last is the
    version's state. One version serves, and one at most is tried.
    """
    last: dict[int, PolicyState | None] = {}
    wrong = []
    for event in events:
        before = last.get(event.version)
        said = f"{event.version}: {event.from_state} → {event.to_state} by {event.actor}"
        if event.from_state != before:
            wrong.append(f"{said}, where it was {before}")
        if event.from_state == event.to_state or not event.reason:
            wrong.append(f"{said}: no change, or no reason")
        last[event.version] = event.to_state
    wrong += [
        f"{one.version} is {one.state}, and its events end at {last.get(one.version)}"
        for one in versions
        if one.state != last.get(one.version)
    ]
    states = Counter(one.state for one in versions)
    if states["serving"] != 1 or states["canary"] > 1:
        wrong.append(f"{states['serving']} versions serve, {states['canary']} are tried")
    return wrong


def changes(events: Iterable[PolicyEvent]) -> Mapping[str, int]:
    """Count the changes by what they were, the most frequent first."""
    counted = Counter(f"{event.from_state} → {event.to_state}" for event in events)
    return dict(counted.most_common())


async def is_tried(connection: AsyncConnection, policy: str) -> bool:
    """Return whether a version is a canary now."""
    return bool(await connection.scalar(IS_TRIED, {"policy": policy}))


async def report(
    url: str, policy: str, answered: Sequence[str], scored: Sequence[str]
) -> dict[str, Any]:
    """Return what the ledger has of a run, and what is wrong with it."""
    engine = make_engine(url)
    try:
        async with engine.connect() as connection:
            events = (await list_events(connection, policy, most=MOST))[::-1]
            versions = await list_versions(connection, policy)
            without_arm = await connection.scalar(WITHOUT_ARM, {"policy": policy})
            with_reward = await connection.scalar(SCORED, {"keys": list(scored)})
            changed = await connection.scalar(CHANGED, {"policy": policy})
    finally:
        await engine.dispose()
    calls = await kept(url, answered, own_episodes=False)
    return {
        "calls_answered": calls.answered,
        "missing": calls.missing,
        "episodes_scored": len(scored),
        "scores_missing": len(set(scored)) - (with_reward or 0),
        "without_arm": without_arm,
        "episodes_of_several_versions": changed,
        "versions": len(versions) - 1,
        "changes": changes(events),
        "wrong_events": wrong_events(events, versions),
    }
