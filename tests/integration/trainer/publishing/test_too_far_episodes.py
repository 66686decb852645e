"""Updates spend off-policy episodes untrained, unless the server is to blame."""

from typing import Any

import pytest

from store.read.past import past_update
from tests.support.records import tokens
from tests.support.trainer.bench import Bench, paused_for
from trainer.publishing.adapters import version_folder
from trainer.recipes.recipe import Recipe
from trainer.updates.circuit_breaker import FAILURES
from trainer.updates.plan import LeftOut, plan_update

LONG = tokens([1, 2, 3], [4, 5, 6, 7])


async def test_off_policy_episode_is_spent_and_the_others_are_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spent: it is consumed untrained."""
    bench.slots = 8
    async with bench.working() as loop:
        assert await loop.update_once()
        await bench.fill("old", tokens=LONG)
        measured: list[Any] = []
        usual = bench.learner.version_logprobs

        def first_is_gone(adapter: Any, rows: Any) -> list[list[float]]:
            if rows == bench.learner.probe_rows():
                return usual(adapter, rows)
            measured.append((adapter, len(rows)))
            own = [list(row.sampled_logprobs) for row in rows]
            own[0] = [own[0][0], -90.0, -90.0, -90.0]
            return own

        monkeypatch.setattr(bench.learner, "version_logprobs", first_is_gone)
        assert await loop.update_once()
    # Version 1, which is trained on, measures what version 0 sampled.
    assert measured == [(version_folder(bench.folder, "m", 1), 4)]
    async with bench.engine.connect() as connection:
        past = await past_update(connection, 2, "m")
    assert past.metrics["dropped"] == {"off_policy": 1}
    assert past.metrics["trained_episodes"] == past.metrics["rows"] == 3
    assert past.metrics["smallest_effective_sample"] == pytest.approx(0.25)
    # What was measured is kept, so that the update's credit can be computed again.
    recipe = Recipe.model_validate(past.recipe)
    again = plan_update(past.claim, recipe, LeftOut.from_metrics(past.metrics))
    assert again.outcomes == tuple(past.outcomes)
    await bench.assert_spent_once(8)


def all_are_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the policy be too far from whatever was sampled; trials are computed as before."""
    usual = bench.learner.version_logprobs

    def gone(adapter: Any, rows: Any) -> list[list[float]]:
        if any(len(row.sampled_ids) != 4 for row in rows):
            return usual(adapter, rows)
        return [[row.sampled_logprobs[0], -90.0, -90.0, -90.0] for row in rows]

    monkeypatch.setattr(bench.learner, "version_logprobs", gone)


async def test_model_server_that_samples_wrongly_pauses_training_and_spends_no_episode(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.slots = 8
    async with bench.working() as loop:
        assert await loop.update_once()
        await bench.fill("wrong", tokens=LONG)
        all_are_gone(bench, monkeypatch)
        bench.learner.test_logprob = -3.0
        assert not await loop.update_once()
        assert bench.learner.self_tests == FAILURES
        await loop.test_if_due()
    assert paused_for() == ["server"]
    await bench.assert_spent_once(4)


async def test_off_policy_episodes_of_a_correct_server_are_spent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.slots = 8
    async with bench.working() as loop:
        assert await loop.update_once()
        await bench.fill("old", tokens=LONG)
        all_are_gone(bench, monkeypatch)
        assert await loop.update_once()
        assert bench.learner.self_tests == 1
        assert not await loop.update_once()
    last = (await bench.updates())[-1]
    assert (last.version, last.metrics["dropped"]) == (None, {"off_policy": 4})
    await bench.assert_spent_once(8)
