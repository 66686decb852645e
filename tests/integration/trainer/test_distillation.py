"""A trainer with a teacher: any finished episode is trained once, without rewards."""

from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import torch
from pydantic import SecretStr
from transformers import AutoTokenizer

from pawl.credit import explain_past
from store.read.past import past_update
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest, reasons
from tests.support.records import ago, call, reward, tokens
from tests.support.servers.computing_server import computing_server
from tests.support.servers.fake_server import FakeModelServer, fake_model_server
from tests.support.shallow import write_shallow
from tests.support.trainer.bench import Bench, paused_for, try_again
from tests.support.training import recipe, write_adapter
from trainer.batches import Row, bare_row, with_logprobs
from trainer.errors import TeacherError
from trainer.learners.learner import Learner
from trainer.publishing.model_server import ModelServer
from trainer.recipes.recipe import (
    ClaimOptions,
    CreditOptions,
    OptimizerOptions,
    Recipe,
    TeacherOptions,
)
from trainer.updates.plan import Plan, taught_plan
from trainer.updates.teacher import Teacher, group_prefixes

CREDIT = CreditOptions(baseline="none", normalisation="none")
UPDATES = 6


@pytest.fixture
async def teacher() -> AsyncIterator[FakeModelServer]:
    """A server whose model `m` gives every token −2, with the scripted learner's tokenizer."""
    async with fake_model_server() as found:
        found.texts, found.logprobs["m"] = {7: "words"}, -2.0
        yield found


@pytest.fixture
async def taught(bare: Bench, teacher: FakeModelServer) -> Bench:
    """A trainer with that teacher, and four episodes of which one is still going on."""
    made = Recipe(
        learner="distill",
        claim=ClaimOptions(group_size=1, groups=2),
        credit=CREDIT,
        teacher=TeacherOptions(url=teacher.url, model="m", finished_after_s=30.0),
    )
    bare.recipe = made.model_copy(update={"publish": bare.recipe.publish})
    async with bare.engine.begin() as connection:
        await ensure_base(connection, "m")
        silent = {"http_status": 400, "trainable": False, "reason": "r"}
        await ingest(
            connection,
            [
                call("unscored", **ago(60)),
                call("scored", **ago(5)),
                reward(0.0, episode="scored"),
                call("failed", **ago(62)),
                call("failed", **ago(61), **silent),
                call("going-on", **ago(5, 1)),
            ],
        )
    return bare


async def test_distillation_trains_any_finished_episode_once(taught: Bench) -> None:
    # Two of three at a time; the one that is going on is left.
    assert await taught.run_once()
    assert not await taught.run_once()
    trained = {"failed": None, "unscored": None}
    assert await reasons(taught.engine) == trained
    async with taught.engine.begin() as connection:
        await ingest(connection, [call("later", **ago(40))])
    assert await taught.run_once()
    assert await reasons(taught.engine) == trained | {"scored": None, "later": None}
    # The calls were recorded with −1 for each token.
    assert (await taught.last_metrics())["teacher_kl"] == pytest.approx(1.0)
    await taught.assert_spent_once(4)
    async with taught.engine.connect() as connection:
        explained = explain_past(await past_update(connection, 1, "m"))
    assert explained.notes == [
        "a teacher gave each token its advantage; the ledger does not store these"
    ]
    assert {line.advantage for line in explained.lines} == {None}
    assert sum(line.weight for line in explained.lines) == pytest.approx(1.0)


async def test_training_pauses_with_a_reason_while_the_teacher_is_away(
    taught: Bench, teacher: FakeModelServer
) -> None:
    teacher.cannot_answer, teacher.engine_is_dead = {"m"}, True
    async with taught.working() as loop:
        assert not await loop.update_once()
        assert not await try_again(loop)
        assert paused_for() == ["teacher"]
        assert "the teacher 'm' cannot be asked, and nothing is" in (loop._breaker.why or "")
        assert [one.state for one in await taught.updates()] == ["abandoned"]
        assert (await taught.consumed(), await taught.claimed()) == (0, 0)
        teacher.cannot_answer, teacher.engine_is_dead = set(), False
        assert await try_again(loop)
        assert not paused_for()
    await taught.assert_spent_once(2)


async def test_trainer_pauses_at_its_start_until_the_teacher_fits(
    taught: Bench, teacher: FakeModelServer
) -> None:
    teacher.texts = {8: "words"}
    async with taught.working() as loop:
        await loop.check_server()
        assert "the teacher's tokenizer is not the policy's" in (loop._breaker.why or "")
        assert not await loop.update_once()
        assert await taught.updates() == []
        teacher.texts = {7: "words"}
        assert await try_again(loop)


async def test_call_too_long_for_the_teacher_is_spent_alone(
    taught: Bench, teacher: FakeModelServer
) -> None:
    """Its episode is consumed untrained; the others are trained."""
    async with taught.engine.begin() as connection:
        made = tokens([1, 2, 3, 4, 5, 6], [4, 5])
        await ingest(connection, [call("long", tokens=made, **ago(40))])
    teacher.context = 8
    taught.change("claim", groups=1)
    for _ in range(3):
        assert await taught.run_once()
    spent = await reasons(taught.engine)
    assert spent.pop("long") == "too_long"
    assert set(spent.values()) == {None}


def probe() -> tuple[str, list[int]]:
    return "words", [7]


@pytest.mark.parametrize(
    ("changes", "model", "why"),
    [
        ({}, "other", "serves m: serve it, or name in"),
        ({"texts": {8: "words"}}, "m", "the teacher's tokenizer is not the policy's"),
        ({"texts": {}}, "m", "no token ids at http.*/tokenize: 404"),
        ({"key": "other"}, "m", "401 .*PAWL_TEACHER_API_KEY"),
        ({"longest": 3}, "m", "maximum context length is 3 tokens"),
    ],
)
async def test_unusable_teacher_is_refused_with_the_reason(
    teacher: FakeModelServer, changes: dict[str, Any], model: str, why: str
) -> None:
    for name, value in changes.items():
        setattr(teacher, name, value)
    options = TeacherOptions(url=teacher.url, model=model)
    with pytest.raises(TeacherError, match=f"teacher '{model}' cannot be asked.*{why}"):
        await Teacher(options, probe, SecretStr("wrong")).logprobs([bare_row(0, [1, 2], [3, 4])])


async def test_teacher_is_asked_with_its_key_and_once_for_nested_calls(
    teacher: FakeModelServer,
) -> None:
    teacher.key = "sesame"
    options = TeacherOptions(url=teacher.url, model="m")
    first, second = bare_row(0, [1, 2], [3]), bare_row(1, [1, 2, 3, 4], [5, 6])
    found = await Teacher(options, probe, SecretStr("sesame")).logprobs([first, second])
    assert found == {first.key: [-2.0], second.key: [-2.0, -2.0]}
    assert teacher.asked == 1


def test_rows_of_a_chain_each_extend_the_previous_row() -> None:
    rows = [
        bare_row(number, ids[:-1], ids[-1:])
        for number, ids in enumerate([[1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [2, 1]])
    ]
    chains = [{row.episode_id.int for row in chain} for chain in group_prefixes(rows)]
    assert sorted(map(sorted, chains)) in ([[0, 1, 3], [2], [4]], [[0, 2], [1, 3], [4]])


# A real teacher


def taught_recipe(url: str) -> Recipe:
    made = recipe(micro_batch_tokens=2048)
    free = made.off_policy.model_copy(update={"min_overlap": 0.0})
    return made.model_copy(
        update={
            "learner": "distill",
            "credit": CREDIT,
            "optimizer": OptimizerOptions(learning_rate=1e-3),
            "off_policy": free,
            "teacher": TeacherOptions(url=url, model="big"),
        }
    )


def answers(learner: Learner, prompt: list[int], seed: int, count: int = 24) -> list[Row]:
    """What the policy says at temperature one, three tokens each."""
    torch.manual_seed(seed)
    seen = torch.tensor([prompt] * count)
    learner._model.eval()
    with torch.no_grad():
        for _ in range(3):
            chances = torch.softmax(learner._model(seen).logits[:, -1].float(), -1)
            seen = torch.cat([seen, torch.multinomial(chances, 1)], 1)
    rows = [
        msgspec.structs.replace(
            bare_row(number, ids[: len(prompt)], ids[len(prompt) :]), weight=1 / count
        )
        for number, ids in enumerate(seen.tolist())
    ]
    own = zip([row.key for row in rows], learner.logprobs(rows), strict=True)
    return with_logprobs(rows, dict(own))


@pytest.mark.timeout(900)
async def test_policy_moves_towards_its_teacher(model_dir: str, tmp_path: Path) -> None:
    """A model's first layers: as they are, and with an adapter that changes much as its teacher."""
    shallow = tmp_path / "shallow"
    shallow.mkdir()
    model_dir = str(write_shallow(Path(model_dir), shallow, 3))
    adapter = write_adapter(model_dir, tmp_path / "adapter", seed=3, lora_alpha=160)
    words = AutoTokenizer.from_pretrained(model_dir)
    prompt = words("The capital of France is", add_special_tokens=False)["input_ids"]
    found: list[float] = []
    async with computing_server("base", model_dir) as url, ModelServer(url) as server:
        await server.load("big", adapter)
        rule = taught_recipe(url)
        learner = Learner(model_dir, rule, 0, tmp_path / "scratch")
        assert rule.teacher is not None
        teacher = Teacher(rule.teacher, learner.vocabulary_probe, None)
        for update in range(UPDATES):
            rows = tuple(answers(learner, prompt, update))
            nothing = Plan(
                credited=(), rows=rows, outcomes=(), metrics={}, step_share=1.0, baselines=None
            )
            plan = taught_plan(nothing, await teacher.logprobs(rows))
            learner.update(plan.rows)
            found.append(plan.metrics["teacher_kl"])
    assert fmean(found[-3:]) < 0.9 * fmean(found[:3]), found
