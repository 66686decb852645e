"""Side calls of an agent, from a real proxy to the credit of an update."""

import json
from typing import Any

from msgspec.structs import replace

from store.claim_query import ClaimRule
from store.claims import Claim
from store.read.lines import encoded_line
from store.records import Episode
from store.version_states import ensure_base
from tests.integration.conftest import Proxy
from tests.support.ledger.updates import claimed
from tests.support.recordings import FOLDER
from tests.support.records import START
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import Plan, plan_update

RULE = ClaimRule(policy="m", group_size=2, groups=1, max_age_s=1e9)
RECIPE: dict[str, Any] = {
    "claim": {"group_size": 2, "groups": 1},
    "credit": {"normalisation": "none"},
}
IMITATING = RECIPE | {
    "learner": "sft",
    "credit": {"baseline": "none", "normalisation": "none"},
    "sft": {"min_reward": 0.0},
}
SENT = json.loads((FOLDER / "side_calls.json").read_text())
TITLE, COMPACTION = (
    next(one["request"] for one in SENT if (one["client"], one["kind"]) == ("OpenCode", kind))
    for kind in ("title", "compaction")
)
WORK = next(one["request"] for one in SENT if (one["client"], one["kind"]) == ("OpenCode", None))


async def work(proxy: Proxy, episode: str) -> None:
    """Name the session, work on two turns, and compact what was said."""
    headers = {"x-session-id": episode, "x-pawl-task": "t"}
    for sent in (TITLE, WORK, WORK | {"messages": [*WORK["messages"], *MORE]}, COMPACTION):
        reply = await proxy.chat(headers=headers, **sent | {"model": "m", "stream": False})
        assert reply.status == 200


MORE = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]


async def test_threads_of_sub_agents_are_exported_as_lanes_of_one_episode(proxy: Proxy) -> None:
    session = {"x-claude-code-session-id": "s"}
    for agent in (None, "a1", "b2", "a1"):
        headers = session if agent is None else session | {"x-claude-code-agent-id": agent}
        assert (await proxy.chat(headers=headers)).status == 200
    [episode] = await proxy.episodes(4)
    calls = json.loads(encoded_line(episode, START))["calls"]
    assert [(call["agent"], call.get("lane")) for call in calls] == [
        ("default", None),
        ("subagent", "a1"),
        ("subagent", "b2"),
        ("subagent", "a1"),
    ]


def without_side_calls(claim: Claim) -> Claim:
    def work_of(episode: Episode) -> Episode:
        return replace(episode, calls=tuple(c for c in episode.calls if c.side is None))

    groups = (replace(g, episodes=tuple(map(work_of, g.episodes))) for g in claim.groups)
    return replace(claim, groups=tuple(groups))


def planned(claim: Claim, recipe: dict[str, Any]) -> Plan:
    return plan_update(claim, Recipe.model_validate(recipe))


async def test_side_calls_are_recorded_and_get_no_credit(proxy: Proxy) -> None:
    async with proxy.engine.begin() as connection:
        await ensure_base(connection, "m")
    for episode, value in (("good", 1.0), ("bad", 0.0)):
        await work(proxy, episode)
        target = {"metric": "reward", "value": value, "episode": f"session:{episode}"}
        assert (await proxy.feedback(target))[0] == 200
    found = await proxy.episodes(8, lambda all_: all(one.feedback for one in all_))
    assert [[c.side for c in one.calls] for one in found] == [
        ["title", None, None, "compaction"]
    ] * 2
    # As every call they have their token ids, and they alone cannot be trained.
    assert all(call.tokens.sampled_ids for one in found for call in one.calls)
    assert {(c.side is None, c.trainable, c.reason) for one in found for c in one.calls} == {
        (True, True, None),
        (False, False, "side"),
    }
    line = json.loads(encoded_line(found[0], START))
    assert [call.get("side") for call in line["calls"]] == ["title", None, None, "compaction"]
    assert (await proxy.counters())['pawl_calls_not_trainable_total{reason="side"}'] == 4

    claim = await claimed(proxy.engine, RULE)
    assert claim is not None
    for recipe in (RECIPE, IMITATING):
        plan, alone = planned(claim, recipe), planned(without_side_calls(claim), recipe)
        side = [one for one in plan.credited if one.call.side]
        assert len(side) == 4
        assert {(one.r_final, one.advantage, one.weight) for one in side} == {(None, None, 0.0)}
        assert {one.reason for one in side} == {"side"}
        # The work's credit, and each trained row, are those of the same work without side calls.
        ours = [replace(one, position=0) for one in plan.credited if not one.call.side]
        assert ours == [replace(one, position=0) for one in alone.credited]
        assert [replace(one, position=0) for one in plan.rows] == [
            replace(one, position=0) for one in alone.rows
        ]
        assert plan.rows
        assert plan.outcomes == alone.outcomes


async def test_conversation_after_a_compaction_names_it_in_the_export(proxy: Proxy) -> None:
    await work(proxy, "s")
    # The sub-agent's thread goes on as before; the main agent's begins anew.
    again = WORK | {"model": "m", "stream": False}
    for agent in ("other", "default", "default"):
        headers = {"x-session-id": "s", "x-pawl-agent": agent}
        assert (await proxy.chat(headers=headers, **again)).status == 200
    [episode] = await proxy.episodes(7)
    calls = json.loads(encoded_line(episode, START))["calls"]
    compaction, other, first, second = calls[3:]
    assert compaction["side"] == "compaction"
    assert [call.get("compacted_by") for call in (*calls[:4], other, second)] == [None] * 6
    assert first["compacted_by"] == compaction["call"]
