"""Updates leave out what the policy is too far from: spent, unless the server is to blame."""

from typing import Any

import pytest

from store.claims import list_updates
from store.read.past import past_update
from store.records import SpoolRecord
from store.write.ingest import ingest
from tests.support.records import call, reward, tokens
from tests.support.trainer.pacing import working
from tests.support.trainer.pausing import paused_for
from tests.support.trainer.recovery import Bench, bench
from trainer.publishing.adapters import version_folder
from trainer.recipes.recipe import Recipe
from trainer.updates.circuit_breaker import FAILURES
from trainer.updates.plan import LeftOut, plan_update

__all__ = ["bench"]


async def fill_long(bench: Bench, name: str) -> None:
    """A group of two episodes whose replies have four tokens, sampled by version 0."""
    records: list[SpoolRecord] = []
    for task in range(2):
        for member in range(2):
            episode = f"{name}{task}-{member}"
            made = tokens([1, 2, task], [4, 5, 6, 7])
            records += [call(episode, task=f"{name}{task}", tokens=made)]
            records += [reward(float(member), episode=episode)]
    async with bench.engine.begin() as connection:
        await ingest(connection, records)


async def test_what_the_policy_is_too_far_from_is_spent_and_the_others_are_trained(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(bench, 8) as loop:
        assert await loop.update_once()
        await fill_long(bench, "old")
        measured: list[Any] = []

        def first_is_gone(adapter: Any, rows: Any) -> list[list[float]]:
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
    again = plan_update(past.claim, recipe, LeftOut.recorded(past.metrics))
    assert again.outcomes == tuple(past.outcomes)
    await bench.assert_spent_once(8)


def all_are_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the policy be too far from whatever was sampled; trials are computed as before."""
    usual = bench.learner.version_logprobs
    # What the scripted learner says of any row, and so a server that fits.
    bench.fake.logprobs["m"] = -0.5

    def gone(adapter: Any, rows: Any) -> list[list[float]]:
        if any(len(row.sampled_ids) != 4 for row in rows):
            return usual(adapter, rows)
        return [[row.sampled_logprobs[0], -90.0, -90.0, -90.0] for row in rows]

    monkeypatch.setattr(bench.learner, "version_logprobs", gone)


async def test_a_server_that_samples_wrongly_spends_nothing_and_pauses_training(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(bench, 8) as loop:
        assert await loop.update_once()
        await fill_long(bench, "wrong")
        all_are_gone(bench, monkeypatch)
        bench.learner.trial_logprob = -3.0
        assert not await loop.update_once()
        assert bench.learner.trials == FAILURES
        await loop.try_again()
    assert paused_for() == ["server"]
    await bench.assert_spent_once(4)


async def test_what_a_right_server_sampled_too_far_away_is_spent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(bench, 8) as loop:
        assert await loop.update_once()
        await fill_long(bench, "old")
        all_are_gone(bench, monkeypatch)
        assert await loop.update_once()
        assert bench.learner.trials == 1
        assert not await loop.update_once()
    async with bench.engine.connect() as connection:
        last = (await list_updates(connection, "m"))[-1]
    assert (last.version, last.metrics["dropped"]) == (None, {"off_policy": 4})
    await bench.assert_spent_once(8)
