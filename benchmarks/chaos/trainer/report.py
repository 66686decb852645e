"""Report a policy's two runs, and the ledger that they were over."""

from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg

from benchmarks.chaos.trainer.found import LEDGER, Found, differing
from benchmarks.chaos.trainer.place import Lives

# Whatever a trainer could have made or held, by the name of its policy.
_OF_OTHERS: Final = """
    SELECT 'version of ' || name FROM policies WHERE name <> ALL($1)
    UNION ALL SELECT 'update of ' || policy FROM updates WHERE policy <> ALL($1)
    UNION ALL SELECT 'claim of ' || policy FROM episode_policies WHERE policy <> ALL($1)
"""
_FIRST: Final = f"""
    SELECT t.agent, count(*) FROM episodes e JOIN transitions t ON t.id = e.first_call_id
    WHERE {LEDGER} GROUP BY 1 ORDER BY 1
"""
_CALLS: Final = f"""
    SELECT coalesce(t.policy, 'no policy'), count(*)
    FROM transitions t JOIN episodes e ON e.id = t.episode_id
    WHERE {LEDGER} GROUP BY 1 ORDER BY 1
"""


class Trained(NamedTuple):
    """Describe a policy after one of its runs."""

    found: Found
    lives: Lives
    # Updates that a trainer found whole and recorded after the life before it had ended.
    finished_late: int


def policy_report(updates: int, calm: Trained, killed: Trained) -> dict[str, Any]:
    """Report what became of one policy: in a run left undisturbed, and in one with kills."""
    one, other, lives = calm.found, killed.found, killed.lives
    adapter = f"{max(one.states)}/adapter_model.safetensors"
    kills = sum(lives.killed.values())
    return {
        "updates": updates,
        "episodes": len(one.outcomes),
        "kills": kills,
        "killed": dict(lives.killed.most_common()),
        "kills_without_work": lives.idle,
        "asked_to_stop": len(lives.stopped_after),
        "slowest_stop_s": round(max(lives.stopped_after, default=0.0), 2),
        "by_themselves": [*calm.lives.by_themselves, *lives.by_themselves],
        "updates_abandoned": other.updates.get("abandoned", 0),
        "updates_finished_late": killed.finished_late,
        "lost": [*one.lost, *other.lost],
        "twice": [*one.twice, *other.twice],
        "spent_otherwise": differing(one.outcomes, other.outcomes),
        "versions": {"undisturbed": max(one.states), "killed": max(other.states)},
        "states_differ": differing(one.states, other.states),
        "files": len(one.files),
        "files_differ": differing(one.files, other.files),
        "final_adapter": {
            "undisturbed": one.files.get(adapter, "none")[:16],
            "killed": other.files.get(adapter, "none")[:16],
        },
        "an_update_s": round(one.update_s, 2),
        "undisturbed_s": round(calm.lives.seconds, 1),
        "killed_s": round(lives.seconds, 1),
        "a_life_s": round(lives.seconds / (kills + 1), 2),
    }


async def ledger_report(url: str, adapters: Path, policies: list[str]) -> dict[str, Any]:
    """Report who called in a run's ledger, and what it has of policies that no trainer is for."""
    connection = await asyncpg.connect(url)
    try:
        first, calls = await connection.fetch(_FIRST), await connection.fetch(_CALLS)
        others = [row[0] for row in await connection.fetch(_OF_OTHERS, policies)]
    finally:
        await connection.close()
    strange = {path.name for path in adapters.glob("[!.]*")} - set(policies)
    return {
        "episodes_begun_by": dict(map(tuple, first)),
        "calls_answered_by": dict(map(tuple, calls)),
        "of_untrained": [*others, *(f"folder {name}" for name in sorted(strange))],
    }
