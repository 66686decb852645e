"""Calls whose grammar cannot be replayed: the loop trains the others, and credit knows it later."""

import json
from typing import Any

import msgspec
import pytest

from store.read.past import past_update
from tests.support.records import tokens
from tests.support.trainer.bench import Bench
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import LeftOut, plan_update

GRAMMAR = {"kind": "regex", "text": "a+"}
HELD = json.dumps({"temperature": 1.0, "grammar": GRAMMAR}).encode()


async def fill(bench: Bench, name: str, held: int, *, has_logprobs: bool = True) -> list[str]:
    """Store two groups whose first `held` calls were held to a grammar; return these calls' ids."""

    def each(task: int, member: int) -> dict[str, Any]:
        if 2 * task + member >= held:
            return {}
        made = tokens([1, 2, 3], [4, 5])
        if not has_logprobs:
            made = msgspec.structs.replace(made, sampled_logprobs=b"")
        return {"sampling": HELD, "tokens": made}

    calls = await bench.fill(name, each)
    return [str(made.id) for made in calls[:held]]


async def test_trainer_checks_the_grammar_of_each_constrained_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.run_once()
    asked: list[Any] = []

    def replayed(distribution: Any, sampled_ids: Any) -> None:
        asked.append((distribution.grammar.text, sampled_ids))

    monkeypatch.setattr(bench.learner, "why_unreplayable", replayed)
    await fill(bench, "u", 2)
    assert await bench.run_once()
    assert asked == [("a+", (4, 5))] * 2
    metrics = await bench.last_metrics()
    assert metrics["rows"] == 4
    assert "unreplayed_calls" not in metrics


async def test_calls_whose_grammar_cannot_be_replayed_are_left_out_and_later_credit_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.run_once()
    monkeypatch.setattr(bench.learner, "why_unreplayable", lambda *_: "outside_grammar")
    ids = await fill(bench, "u", 2)
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    assert (metrics["rows"], metrics["dropped"]) == (2, {"no_trainable_call": 2})
    assert metrics["unreplayed_calls"] == dict.fromkeys(ids, "outside_grammar")
    await bench.assert_spent_once(8)
    async with bench.engine.connect() as connection:
        past = await past_update(connection, 2, "m")
    recipe = Recipe.model_validate(past.recipe)
    plan = plan_update(past.claim, recipe, LeftOut.from_metrics(past.metrics))
    assert sorted(str(one.call.reason) for one in plan.credited) == [
        *("None", "None", "outside_grammar", "outside_grammar")
    ]


async def test_update_whose_calls_all_have_grammars_that_cannot_be_replayed_makes_no_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.run_once()
    monkeypatch.setattr(bench.learner, "why_unreplayable", lambda *_: "grammar_not_built")
    ids = await fill(bench, "u", 4)
    await bench.run_once()
    metrics = await bench.last_metrics()
    assert set(metrics["unreplayed_calls"]) == set(ids)
    assert max(await bench.states()) == 1
    await bench.assert_spent_once(8)


async def test_log_probabilities_are_recomputed_only_if_the_grammar_can_be_replayed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls with a grammar and no log-probabilities."""
    await bench.run_once()
    rows: list[Any] = []
    computed = bench.learner.version_logprobs

    def recorded(adapter: Any, asked: Any) -> list[list[float]]:
        rows.extend(asked)
        return computed(adapter, asked)

    monkeypatch.setattr(bench.learner, "version_logprobs", recorded)
    await fill(bench, "u", 2, has_logprobs=False)
    assert await bench.run_once()
    assert bench.learner.asked == [(None, 2)]
    assert {row.distribution.grammar.text for row in rows if row.recomputed} == {"a+"}
    metrics = await bench.last_metrics()
    assert metrics["rows"] == 4

    monkeypatch.setattr(bench.learner, "why_unreplayable", lambda *_: "outside_grammar")
    ids = await fill(bench, "v", 2, has_logprobs=False)
    assert await bench.run_once()
    assert bench.learner.asked == [(None, 2)]
    metrics = await bench.last_metrics()
    assert (metrics["rows"], metrics["unreplayed_calls"]) == (
        *(2, dict.fromkeys(ids, "outside_grammar")),
    )
