"""Rows without log-probabilities: the version that sampled them gives the same ones again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import torch
from sqlalchemy import text

from store.claims import keep_policy_logprobs
from store.read.past import past_update
from store.values.packing import unpack_logprobs
from store.version_queries import mark_files_deleted
from store.version_states import mark_unloaded
from tests.integration.trainer.learners.test_learner import plain_logprobs
from tests.integration.trainer.recovery.test_resuming import same
from tests.support.faults.unreadable import unreadable
from tests.support.ledger.totals import totals
from tests.support.records import tokens
from tests.support.trainer.bench import Bench
from tests.support.trainer.reference import shake
from tests.support.training import (
    Renew,
    in_every_layout,
    ppo_recipe,
    recipe,
    rows,
    write_tiny_model,
)
from trainer.batches import Row
from trainer.errors import AdapterError, FilesUnread, Interrupted, Unusable
from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.publishing import adapters
from trainer.publishing.adapters import BASE_FILE
from trainer.recipes.recipe import Recipe
from trainer.updates.plan import LeftOut, plan_update

RECIPES = {"grpo": recipe(steps=2), "ppo": ppo_recipe(steps=2)}


def saved(made: Learner, folder: Path) -> Path:
    folder.mkdir(parents=True)
    made.save(folder)
    return folder


def lineage(made: Learner, folder: Path) -> list[Path]:
    """Two versions, both far from the base."""
    shake(made)
    found = []
    for number in (1, 2):
        made.update(rows(number))
        found.append(saved(made, folder / str(number)))
    return found


@pytest.fixture(scope="module")
def versions(renew: Renew, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return lineage(renew(RECIPES["grpo"]), tmp_path_factory.mktemp("versions"))


def without(batch: Sequence[Row], version: int) -> list[Row]:
    return [
        msgspec.structs.replace(row, sampled_logprobs=(), recomputed=True, version=version)
        for row in batch
    ]


def filled(batch: Sequence[Row], values: Sequence[Sequence[float]], **changes: Any) -> list[Row]:
    return [
        msgspec.structs.replace(row, sampled_logprobs=tuple(own), **changes)
        for row, own in zip(batch, values, strict=True)
    ]


def test_version_reproduces_its_sampling_log_probabilities(
    tiny_model: str, tmp_path: Path, versions: list[Path]
) -> None:
    """What a server that holds the version would have said: one sequence at a time, no sharing."""
    one, two = versions
    for layout, made in in_every_layout(tiny_model, RECIPES["grpo"], tmp_path):
        told: dict[Path | None, list[torch.Tensor]] = {}
        for version in (None, one, two):
            made.restore(version)
            made._model.eval()
            with torch.no_grad():
                told[version] = [plain_logprobs(made._model, row) for row in rows()]
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(told[one], told[two], strict=True))
        for version in (two, None, one):
            found = made.version_logprobs(version, rows())
            for ours, theirs in zip(found, told[version], strict=True):
                assert float((torch.tensor(ours) - theirs).abs().max()) < 1e-5, layout


@pytest.mark.parametrize("name", RECIPES)
def test_recomputing_rows_does_not_change_the_following_update(
    renew: Renew, tmp_path: Path, name: str
) -> None:
    one, two = lineage(renew(RECIPES[name]), tmp_path)
    batch = without(rows()[:4], 2) + without(rows()[4:8], 0) + without(rows()[8:], 1)
    made = renew(RECIPES[name])
    made.restore(two)
    values = [
        *made.version_logprobs(two, batch[:4]),
        *made.version_logprobs(None, batch[4:8]),
        *made.version_logprobs(one, batch[8:]),
    ]
    made.restore(two)
    known = filled(batch, values)
    metrics = made.update(known)
    assert metrics["recomputed_rows"] == len(batch)
    after = saved(made, tmp_path / "made")

    fresh = renew(RECIPES[name])
    fresh.restore(two)
    fresh.update(known)
    assert same(after, saved(fresh, tmp_path / "fresh"))


def test_recomputing_leaves_the_learner_bit_for_bit_unchanged(
    renew: Renew, tmp_path: Path, versions: list[Path]
) -> None:
    one, two = versions
    used = renew(RECIPES["grpo"])
    used.restore(two)
    before = {name: value.clone() for name, value in used._model.state_dict().items()}
    for version in (one, None, two):
        used.version_logprobs(version, rows())
    used.restore(two)
    after = used._model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert same(saved(used, tmp_path / "again"), two)


def test_recomputed_rows_do_not_count_in_the_drift(renew: Renew) -> None:
    # One step: drift is measured in the first.
    made = renew(recipe(steps=1))
    told = rows()[:6]
    alone = made.update(told)
    made.restore(None)
    silent = filled(rows()[6:], [[-9.0] * len(row.sampled_ids) for row in rows()[6:]])
    silent = [msgspec.structs.replace(row, recomputed=True) for row in silent]
    both = made.update([*told, *silent])
    assert both["drift_kl"] == pytest.approx(alone["drift_kl"], rel=1e-4)
    made.restore(None)
    assert made.update(silent)["drift_kl"] is None


def test_episode_with_out_of_vocabulary_ids_is_blamed(renew: Renew) -> None:
    strange = msgspec.structs.replace(without(rows(), 0)[0], sampled_ids=(5, 97))
    with pytest.raises(Unusable) as raised:
        renew(recipe()).version_logprobs(None, [*without(rows(), 0)[1:], strange])
    assert raised.value.reason == "damaged"
    assert set(raised.value.episodes) == {UUID(int=0)}


def test_interrupted_learner_recomputes_no_log_probabilities(
    tiny_model: str, tmp_path: Path
) -> None:
    made = Learner(tiny_model, recipe(), seed=0, scratch=tmp_path)
    made.interrupt()
    with pytest.raises(Interrupted):
        made.version_logprobs(None, without(rows(), 0))


def test_version_of_another_base_model_does_not_fit_the_learner(
    renew: Renew, tiny_model: str, tmp_path: Path
) -> None:
    made = renew(recipe())
    one = saved(made, tmp_path / "1")
    assert made.why_another_base(one) is None
    half = recipe().model_copy(update={"dtype": "bfloat16"})
    assert Base(tiny_model, half).why_another_base(one) is None

    other = Base(write_tiny_model(tmp_path / "other", seed=1), recipe())
    assert other.why_another_base(one) == "it was trained on another base model"
    (one / BASE_FILE).write_bytes(b"half")
    with pytest.raises(AdapterError, match="cannot be read"):
        made.why_another_base(one)
    (one / BASE_FILE).unlink()
    with pytest.raises(AdapterError, match="is not there; restore it"):
        made.why_another_base(one)


# The loop


async def fill(bench: Bench, name: str, version: int, *, has_logprobs: bool = False) -> None:
    """Store two groups, of which one call each came without log-probabilities."""
    silent = msgspec.structs.replace(tokens([1, 2, 3], [4, 5]), sampled_logprobs=b"")

    def each(_: int, member: int) -> dict[str, Any]:
        return {} if member or has_logprobs else {"tokens": silent}

    await bench.fill(name, each, policy_version=version)


async def test_trainer_recomputes_log_probabilities_with_the_version_that_sampled(
    bench: Bench,
) -> None:
    await bench.run_once()
    await fill(bench, "u", 1)
    assert await bench.run_once()
    one = adapters.version_folder(bench.folder, "m", 1)
    assert bench.learner.asked == [(one, 2)]
    assert bench.learner.restored == one
    await fill(bench, "v", 1)
    assert await bench.run_once()
    assert bench.learner.asked[1:] == [(one, 2)]
    await fill(bench, "w", 0)
    assert await bench.run_once()
    assert bench.learner.asked[2:] == [(None, 2)]
    assert bench.learner.updates == 4


async def test_trained_calls_also_get_the_log_probabilities_of_the_policy_in_training(
    bench: Bench,
) -> None:
    await bench.run_once()
    async with bench.engine.connect() as connection:
        trained = set((await connection.execute(text("SELECT id FROM transitions"))).scalars())
    await fill(bench, "u", 0, has_logprobs=True)
    query = text("SELECT id, policy_logprobs FROM transitions")
    async with bench.engine.connect() as connection:
        rows = (await connection.execute(query)).all()
    assert len(rows) > len(trained)
    for row in rows:
        given = set(unpack_logprobs(row.policy_logprobs or b""))
        assert given == ({-2.0} if row.id in trained else set())
    # An update that compares nothing leaves nothing of an earlier one.
    async with bench.engine.begin() as connection:
        await keep_policy_logprobs(connection, dict.fromkeys(trained))
        assert not (await connection.scalar(text("SELECT count(policy_logprobs) FROM transitions")))


LOSSES = {
    "the files are gone": lambda folder: [path.unlink() for path in folder.glob("*.*")],
    "a file was changed": lambda folder: (folder / adapters.SERVED_FILES[1]).write_bytes(b"other"),
    "the manifest is damaged": lambda folder: (folder / adapters.MANIFEST).write_bytes(b"{"),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_calls_without_log_probabilities_are_not_trained_if_their_version_is_lost(
    bench: Bench, loss: str
) -> None:
    await bench.run_once()
    await fill(bench, "u", 1, has_logprobs=True)
    await bench.run_once()
    LOSSES[loss](adapters.version_folder(bench.folder, "m", 1))
    await fill(bench, "v", 1)
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    assert (metrics["rows"], metrics["lost_versions"]) == (2, {"1": "version_gone"})
    assert metrics["dropped"] == {"no_trainable_call": 2}
    assert bench.learner.asked == []
    await bench.assert_spent_once(12)


@pytest.mark.parametrize("name", [adapters.MANIFEST, *adapters.SERVED_FILES])
async def test_a_version_that_cannot_be_read_for_now_is_not_lost(bench: Bench, name: str) -> None:
    await bench.run_once()
    await fill(bench, "u", 1, has_logprobs=True)
    await bench.run_once()
    await fill(bench, "v", 1)
    one = adapters.version_folder(bench.folder, "m", 1)
    with unreadable(one / name), pytest.raises(FilesUnread, match=f"{name} cannot be read"):
        await bench.run_once()
    # None of its episodes was spent: the next trainer frees them, and trains on all.
    await bench.assert_spent_once(8)
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    assert "lost_versions" not in metrics
    assert bench.learner.asked == [(one, 2)]
    await bench.assert_spent_once(12)


async def test_version_marked_deleted_is_not_used_to_recompute_log_probabilities(
    bench: Bench,
) -> None:
    await bench.run_once()
    await fill(bench, "u", 1, has_logprobs=True)
    await bench.run_once()
    async with bench.engine.begin() as connection:
        await mark_unloaded(connection, "m", [1], "for the test", "operator")
        assert await mark_files_deleted(connection, "m", [1]) == {1}
    # A folder that is still there is not looked at: it may be on its way out.
    await fill(bench, "v", 1)
    assert await bench.run_once()
    assert (await bench.last_metrics())["lost_versions"] == {"1": "version_gone"}
    assert bench.learner.asked == []


async def test_version_of_another_base_is_lost_and_later_credit_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.run_once()
    await fill(bench, "u", 1, has_logprobs=True)
    await bench.run_once()
    monkeypatch.setattr(bench.learner, "why_another_base", lambda folder: "it is of another base")
    await fill(bench, "v", 1)
    # Version 2 is the parent, which is not asked; what it sampled is computed all the same.
    await fill(bench, "w", 2)
    assert await bench.run_once()
    metrics = await bench.last_metrics()
    while "lost_versions" not in metrics:
        assert await bench.run_once()
        metrics = await bench.last_metrics()
    assert metrics["lost_versions"] == {"1": "other_base"}
    async with bench.engine.connect() as connection:
        past = await past_update(connection, 4, "m")
        assert (await totals(connection)).twice_consumed_episodes == 0
    recipe = Recipe.model_validate(past.recipe)
    plan = plan_update(past.claim, recipe, LeftOut.from_metrics(past.metrics))
    assert {one.reason for one in plan.outcomes} == {None, "no_trainable_call"}
    assert {one.call.reason for one in plan.credited} == {None, "other_base"}
