"""`pawl credit` explains an export or an update with the trainer's own figures."""

import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.credit import ExplainedUpdate, explain_past
from pawl.export import export
from store.claim_query import ClaimRule
from store.claims import Claim
from store.errors import UnknownUpdate
from store.ids import new_id
from store.read.episodes import read_episodes
from store.read.past import past_update
from store.records import Group, SpoolRecord, ToolCall
from store.selecting import Selection, select_episodes
from store.version_states import ensure_base
from tests.integration.conftest import Pawl
from tests.support.ledger.episodes import ingest
from tests.support.ledger.updates import claimed, record_update
from tests.support.records import START, call, reward, statement, tool_event
from trainer.credit.assign import TransitionCredit, assign_credit
from trainer.credit.lines import CreditLine, credit_line, credit_lines, read_lines
from trainer.errors import RecipeError
from trainer.recipes.recipe import CreditOptions, Recipe
from trainer.updates.claiming import claim_rule
from trainer.updates.plan import Plan, plan_update

RULE = ClaimRule(policy="m", group_size=2, groups=2, max_age_s=1e9)
RECIPE = Recipe.model_validate(
    {"claim": {"group_size": 2, "groups": 1}, "credit": {"normalisation": "none"}}
)
MOVING = Recipe.model_validate(
    {
        "claim": {"group_size": 1, "groups": 2},
        "credit": {"normalisation": "none"},
    }
)


async def store(engine: AsyncEngine, *records: SpoolRecord) -> None:
    async with engine.begin() as connection:
        await ingest(connection, list(records))
        await ensure_base(connection, "m")


async def fill(engine: AsyncEngine) -> None:
    """Two tasks: corrected and late rewards, single calls', tools asked for and not, failures."""
    tools = tuple(ToolCall(id=one, name="calc", arguments="{}") for one in ("t1", "t2"))
    asking = call("a1", task="a", tool_calls=tools)
    singly = call("a1", task="a", agent="checker")
    await store(
        engine,
        asking,
        singly,
        call("a1", task="a", tool_events=(tool_event("ok", "t1"), tool_event("timeout", "t2"))),
        call("a2", task="a", trainable=False, reason="greedy"),
        call("a2", task="a", tool_events=(tool_event("ok", "nobody asked"),)),
        call("a3", task="a", http_status=400, trainable=False, reason="incomplete"),
        call("b1", task="b"),
        call("b2", task="b"),
        reward(0.2, at=5, episode="a1"),
        reward(0.7, at=9, episode="a1"),
        reward(0.1, at=2, episode="a1"),
        reward(1.0, call=str(singly.id)),
        reward(0.0, episode="a2"),
        reward(0.5, episode="b1"),
        reward(0.5, episode="b2"),
        statement("latency", 9.0, episode="b2"),
    )


async def explained(engine: AsyncEngine, *which: Any) -> ExplainedUpdate:
    async with engine.connect() as connection:
        return explain_past(await past_update(connection, *which))


def lines_of(credited: Any) -> list[CreditLine]:
    def line(one: TransitionCredit) -> CreditLine:
        return credit_line(one.episode, str(one.call.id), one.call.agent, one)

    return sorted((line(one) for one in credited), key=lambda line: (line.episode, line.call))


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"assignment": "call", "failed_reward": -1.0},
        {"assignment": "per_agent"},
        {"baseline": "leave_one_out", "equal_weight": "token"},
    ],
)
async def test_credit_of_an_export_equals_the_trainers_credit(
    engine: AsyncEngine, rule: dict[str, Any]
) -> None:
    await fill(engine)
    out = io.BytesIO()
    await export(engine, Selection(), out)
    read = read_lines(io.BytesIO(out.getvalue()), "export")
    found = credit_lines(read, CreditOptions(**rule))

    async with engine.connect() as connection:
        episodes = await read_episodes(connection, await select_episodes(connection))
    tasks = sorted({episode.task or "" for episode in episodes})
    groups = [
        Group(task=task, episodes=tuple(one for one in episodes if one.task == task))
        for task in tasks
    ]
    credited = assign_credit(
        groups, CreditOptions(**rule), policy="m", oldest_version=0
    ).transitions
    assert sorted(found, key=lambda line: (line.episode, line.call)) == lines_of(credited)
    assert any(line.reason is None for line in found)


async def trained(
    engine: AsyncEngine, kept: dict[str, Any], recipe: Recipe = RECIPE, version: int = 1
) -> tuple[Claim, Plan]:
    """An update, as far as the ledger is concerned."""
    rule = msgspec.structs.replace(claim_rule(recipe, "m"), fewest=1)
    claim = await claimed(engine, rule, recipe=kept)
    assert claim is not None
    plan = plan_update(claim, recipe)
    await record_update(engine, claim, plan, version)
    return claim, plan


async def test_credit_of_a_past_update_is_reproduced_exactly(engine: AsyncEngine) -> None:
    await fill(engine)
    claim, plan = await trained(engine, RECIPE.model_dump(mode="json"))
    expected = lines_of(plan.credited)
    later = int((datetime.now(UTC) + timedelta(hours=1) - START).total_seconds())
    await store(engine, reward(-5.0, at=later, episode="a1"))
    for which in (1, claim.update_id):
        found = await explained(engine, which, None)
        assert sorted(found.lines, key=lambda line: (line.episode, line.call)) == expected
        assert found.notes == []
    # 0.7 against 0; the one tool execution ended as its tool usually does.
    assert [line.advantage for line in expected[:3]] == pytest.approx([0.35] * 3, abs=1e-12)


async def test_past_update_is_explained_with_its_own_moving_baselines(engine: AsyncEngine) -> None:
    expected = []
    for version, scores in ((1, (1.0, 0.0)), (2, (1.0, 0.5))):
        for place, score in enumerate(scores):
            name = f"{version}-{place}"
            await store(engine, call(name, task=f"t/{name}"), reward(score, episode=name))
        _, plan = await trained(engine, MOVING.model_dump(mode="json"), MOVING, version)
        expected.append(lines_of(plan.credited))
    for version, lines in enumerate(expected, start=1):
        found = await explained(engine, version, "m")
        assert (sorted(found.lines, key=lambda line: line.episode), found.notes) == (lines, [])
    # The family's average is 0.5 after the first update, and half-way to 0.75 after the second.
    assert [[line.advantage for line in lines] for lines in expected] == [
        [0.5, -0.5],
        [0.375, -0.125],
    ]


async def test_credit_command_prints_the_credit_of_an_update(
    engine: AsyncEngine, pawl: Pawl
) -> None:
    await fill(engine)
    await trained(engine, RECIPE.model_dump(mode="json"))
    found = await pawl("credit", "--update", "1")
    assert (found.exit_code, found.stderr) == (0, "")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert sum(line["weight"] for line in lines) == pytest.approx(1.0, abs=1e-12)
    missing = await pawl("credit", "--update", "7")
    assert isinstance(missing.exception, UnknownUpdate)


async def test_late_reward_is_noted_beside_an_updates_credit(engine: AsyncEngine) -> None:
    await fill(engine)
    await trained(engine, RECIPE.model_dump(mode="json"))
    await store(engine, reward(-5.0, at=60, episode="a1"))
    notes = "\n".join((await explained(engine, 1, "m")).notes)
    assert "reward_mean = 0.425, and the ledger gives -1.0 now" in notes


async def test_credit_of_an_unknown_or_running_update_is_refused(engine: AsyncEngine) -> None:
    await fill(engine)
    with pytest.raises(UnknownUpdate, match="no update made version 1"):
        await explained(engine, 1, None)
    with pytest.raises(UnknownUpdate, match="no update"):
        await explained(engine, new_id(), None)
    claim = await claimed(engine, RULE)
    assert claim is not None
    with pytest.raises(UnknownUpdate, match="is running"):
        await explained(engine, claim.update_id, None)


async def test_credit_of_an_update_with_an_unreadable_recipe_is_refused(
    engine: AsyncEngine,
) -> None:
    await fill(engine)
    await trained(engine, {"sorcery": 1})
    with pytest.raises(RecipeError, match="cannot read the recipe that the update recorded"):
        await explained(engine, 1, None)
