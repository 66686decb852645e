"""Calls whose grammar cannot be replayed: the loop trains the others, and credit knows it later."""

import json
from typing import Any

import msgspec
import pytest

from store.read.past import past_update
from store.records import SpoolRecord
from store.write.ingest import ingest
from tests.integration.trainer.test_recomputed import last_metrics
from tests.support.records import call, reward
from tests.support.trainer.recovery import Bench, bench, run_once
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import LeftOut, plan_update

__all__ = ["bench"]

GRAMMAR = {"kind": "regex", "text": "a+"}
HELD = json.dumps({"temperature": 1.0, "grammar": GRAMMAR}).encode()


async def fill(bench: Bench, name: str, held: int, *, told: bool = True) -> list[str]:
    """Two groups; the first `held` calls were held to a grammar. Returns these calls' ids.

    Unless they are `told`, these came without log-probabilities.
    """
    records: list[SpoolRecord] = []
    ids = []
    for number in range(4):
        made = call(f"{name}{number}", task=f"{name}{number // 2}")
        if number < held:
            made = call(made.episode, task=made.task, sampling=HELD)
            if not told:
                ids_alone = msgspec.structs.replace(made.tokens, sampled_logprobs=b"")
                made = msgspec.structs.replace(made, tokens=ids_alone)
            ids.append(str(made.id))
        records += [made, reward(float(number % 2), episode=made.episode)]
    async with bench.engine.begin() as connection:
        await ingest(connection, records)
    return ids


async def test_the_loop_asks_of_each_call_that_a_grammar_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_once(bench)
    asked: list[Any] = []

    def replayed(distribution: Any, sampled_ids: Any) -> None:
        asked.append((distribution.grammar.text, sampled_ids))

    monkeypatch.setattr(bench.learner, "why_unreplayable", replayed)
    await fill(bench, "u", 2)
    assert await run_once(bench)
    assert asked == [("a+", (4, 5))] * 2
    metrics = await last_metrics(bench)
    assert metrics["rows"] == 4
    assert "unreplayed_calls" not in metrics


async def test_such_calls_are_left_out_and_credit_knows_it_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_once(bench)
    monkeypatch.setattr(bench.learner, "why_unreplayable", lambda *_: "outside_grammar")
    ids = await fill(bench, "u", 2)
    assert await run_once(bench)
    metrics = await last_metrics(bench)
    assert (metrics["rows"], metrics["dropped"]) == (2, {"no_trainable_call": 2})
    assert metrics["unreplayed_calls"] == dict.fromkeys(ids, "outside_grammar")
    await bench.assert_spent_once(8)
    async with bench.engine.connect() as connection:
        past = await past_update(connection, 2, "m")
    recipe = Recipe.model_validate(past.recipe)
    plan = plan_update(past.claim, recipe, LeftOut.recorded(past.metrics))
    assert sorted(str(one.call.reason) for one in plan.credited) == [
        *("None", "None", "outside_grammar", "outside_grammar")
    ]


async def test_an_update_of_such_calls_alone_makes_no_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_once(bench)
    monkeypatch.setattr(bench.learner, "why_unreplayable", lambda *_: "grammar_not_built")
    ids = await fill(bench, "u", 4)
    await run_once(bench)
    metrics = await last_metrics(bench)
    assert set(metrics["unreplayed_calls"]) == set(ids)
    assert max(await bench.states()) == 1
    await bench.assert_spent_once(8)


async def test_the_version_that_sampled_is_asked_of_calls_that_can_be_replayed_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls with a grammar and no log-probabilities."""
    await run_once(bench)
    rows: list[Any] = []
    computed = bench.learner.version_logprobs

    def recorded(adapter: Any, asked: Any) -> list[list[float]]:
        rows.extend(asked)
        return computed(adapter, asked)

    monkeypatch.setattr(bench.learner, "version_logprobs", recorded)
    await fill(bench, "u", 2, told=False)
    assert await run_once(bench)
    assert bench.learner.asked == [(None, 2)]
    assert {row.distribution.grammar.text for row in rows if row.recomputed} == {"a+"}
    metrics = await last_metrics(bench)
    assert metrics["rows"] == 4

    monkeypatch.setattr(bench.learner, "why_unreplayable", lambda *_: "outside_grammar")
    ids = await fill(bench, "v", 2, told=False)
    assert await run_once(bench)
    assert bench.learner.asked == [(None, 2)]
    metrics = await last_metrics(bench)
    assert (metrics["rows"], metrics["unreplayed_calls"]) == (
        *(2, dict.fromkeys(ids, "outside_grammar")),
    )
