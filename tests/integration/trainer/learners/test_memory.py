"""A learner that runs out of memory takes no half step, and loses no episode but one too long."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from transformers import GPTJPreTrainedModel

from tests.integration.trainer.recovery.test_resuming import same
from tests.integration.trainer.test_recomputed import saved
from tests.support.trainer.families import write_family
from tests.support.training import ppo_recipe, recipe, rows, sft_recipe
from trainer import run
from trainer.batches import Row
from trainer.errors import OUT_OF_MEMORY, TOO_LONG, ShortOfMemory, Unusable
from trainer.learners import model, scoring
from trainer.learners.kernels.layers import SwiGlu
from trainer.learners.learner import Learner
from trainer.learners.model import Base, is_checkpointed
from trainer.recipes.recipe import Recipe
from trainer.settings import TrainerSettings

pytestmark = pytest.mark.usefixtures("measured_once")

RECIPES: dict[str, Callable[..., Recipe]] = {
    "grpo": recipe,
    "ppo": ppo_recipe,
    "sft": sft_recipe,
}


# Each learner, and each pass in which memory runs out.
STAGES = [("grpo", "forward"), ("ppo", "backward"), ("sft", "forward"), ("grpo", "backward")]


class Calm(NamedTuple):
    """What a first update comes to that has memory enough."""

    parameters: list[torch.Tensor]
    loss: float
    tokens: int
    version: Path


@pytest.fixture(scope="module")
def base(tiny_model: str) -> Base:
    """The base of all learners, each of which takes it from the one before."""
    return Base(tiny_model, recipe())


@pytest.fixture(scope="module")
def calm(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Calm]:
    """Return what a recipe's first update comes to; it takes the base."""

    @cache
    def of(name: str) -> Calm:
        folder = tmp_path_factory.mktemp(name)
        made = learner(base, folder, name)
        loss = made.update(rows())["loss"]
        parameters = [parameter.clone() for parameter in made._model.parameters()]
        return Calm(parameters, loss, made._budget.tokens, saved(made, folder / "calm"))

    return of


def learner(model: str | Base, folder: Path, name: str = "grpo", tokens: int = 256) -> Learner:
    """A learner whose micro-batches have several rows."""
    made = RECIPES[name](steps=2)
    batch = made.batch.model_copy(update={"micro_batch_tokens": tokens})
    return Learner(model, made.model_copy(update={"batch": batch}), seed=0, scratch=folder)


def once(real: Callable[..., Any], after: int) -> Callable[..., Any]:
    """`real`, which runs out of memory in its call number `after`, its work half done."""
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(*arguments, **named)
        if calls == after:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    return called


def half_step(optimizer: Any) -> Callable[..., Any]:
    """A step that moves the first parameter alone, the second time it is taken."""
    real, calls = optimizer.step, 0

    def step() -> Any:
        nonlocal calls
        calls += 1
        if calls != 2:
            return real()
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(1.0)
        raise torch.OutOfMemoryError("CUDA out of memory")

    return step


def test_layers_are_checkpointed_under_any_list_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where transformers cannot do so."""
    monkeypatch.setattr(GPTJPreTrainedModel, "supports_gradient_checkpointing", False)
    made = learner(write_family(tmp_path / "model", "gptj"), tmp_path)
    monkeypatch.setattr(made._trainer, "loss_of", once(made._trainer.loss_of, 1))
    made.update(rows())
    assert (made._budget.checkpointed_share, made._budget.tokens) == (1.0, 256)
    assert is_checkpointed(made._model.get_base_model())


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_update_attempt_that_ran_out_of_memory_leaves_no_trace(
    base: Base,
    calm: Callable[[str], Calm],
    tmp_path: Path,
    name: str,
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, short = calm(name), learner(base, tmp_path, name)
    owner, method = {
        "forward": (short._trainer, "loss_of"),
        "backward": (short._trainer.accelerator, "backward"),
    }[stage]
    monkeypatch.setattr(owner, method, once(getattr(owner, method), 1))
    found = short.update(rows())
    for one, other in zip(wanted.parameters, short._model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert found["loss"] == pytest.approx(wanted.loss, rel=1e-4)
    # Afterwards micro-batches are as large as ever.
    short.update(rows(1))
    assert short._budget.tokens == wanted.tokens


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_failed_update_attempt_holds_no_memory_in_the_next_attempt(
    base: Base, tmp_path: Path, name: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(base, tmp_path, name)
    kept: list[Any] = []
    alive: list[int] = []
    take, forward = made._step.take, SwiGlu.forward

    def taken(*given: Any) -> Any:
        alive.append(sum(storage() is not None for storage in kept))
        if len(alive) == 1:
            monkeypatch.setattr(SwiGlu, stage, staticmethod(once(getattr(SwiGlu, stage), 2)))
        return take(*given)

    def noted(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(gate.untyped_storage()))
        return forward(ctx, gate, up)

    monkeypatch.setattr(made._step, "take", taken)
    monkeypatch.setattr(SwiGlu, "forward", staticmethod(noted))
    made.update(rows())
    assert len(alive) > 1
    assert not any(alive)


@pytest.mark.parametrize("name", RECIPES)
def test_half_applied_optimizer_step_is_undone(
    base: Base, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = learner(base, tmp_path, name)
    parent = saved(short, tmp_path / "1")
    short.restore(parent)
    short.update(rows())
    calm = saved(short, tmp_path / "calm")
    short.restore(parent)
    with monkeypatch.context() as patched:
        optimizer = short._trainer.optimizer
        patched.setattr(optimizer, "step", half_step(optimizer))
        with pytest.raises(Unusable, match="memory") as raised:
            short.update(rows())
    assert (raised.value.reason, raised.value.episodes) == (OUT_OF_MEMORY, {})
    short.restore(parent)
    short.update(rows())
    assert same(calm, saved(short, tmp_path / "short"))


@pytest.mark.parametrize(
    "step", ["model.load_base", "model.attach_adapter", "learner.OptimiserSteps"]
)
def test_too_little_memory_for_a_learner_is_reported_with_the_remedy(
    tiny_model: str, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"trainer.learners.{step}", full)
    with pytest.raises(ShortOfMemory, match="micro_batch_tokens"):
        learner(tiny_model, tmp_path)


@pytest.mark.parametrize("what", ["restore", "write_test_adapter"])
def test_too_little_memory_for_an_adapter_is_reported_with_the_remedy(
    base: Base, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(base, tmp_path)
    parent = saved(made, tmp_path / "1")

    def again() -> None:
        if what == "restore":
            made.restore(parent)
        else:
            made.write_test_adapter(tmp_path)

    with monkeypatch.context() as patched:
        if what == "restore":
            patched.setattr("trainer.learners.learner.load_state", full)
        else:
            patched.setattr("trainer.learners.self_test.score_rows", full)
        with pytest.raises(Unusable, match="micro_batch_tokens") as raised:
            again()
    assert (raised.value.reason, raised.value.episodes) == (OUT_OF_MEMORY, {})
    again()


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def of_poison(made: Learner) -> None:
    """Update with a row whose loss is not finite: it is looked for who is to blame."""
    first, *others = rows()
    made.update([msgspec.structs.replace(first, advantage=float("nan")), *others])


def of_all(made: Learner) -> None:
    made.update(rows())


# What runs out of memory, and what the learner is asked for then.
PLACES: dict[str, tuple[str, Callable[[Learner], Any]]] = {
    "clipping": ("torch.nn.utils.clip_grad_norm_", of_all),
    "blame": ("trainer.learners.steps._is_finite", of_poison),
    "view": ("trainer.learners.learner.check_initial_values", of_all),
    "probe": ("trainer.learners.scoring.score_rows", lambda made: made.logprobs(rows())),
    "another version": (
        "trainer.learners.model.Base.attach",
        lambda made: made.version_logprobs(Path("1"), rows()),
    ),
    "writing": ("trainer.learners.learner.save_adapter", lambda made: made.save(Path("1"))),
    "import": (
        "trainer.learners.learner.write_foreign_adapter",
        lambda made: made.adopt(Path("1")),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_running_out_of_memory_names_the_remedy_and_costs_no_episode(
    base: Base,
    calm: Callable[[str], Calm],
    tmp_path: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the trainer would neither hold nor free the update's episodes, but end."""
    wanted, short = calm("grpo"), learner(base, tmp_path)
    where, ask = PLACES[place]
    with monkeypatch.context() as patched:
        patched.setattr(where, full)
        with pytest.raises(ShortOfMemory, match="micro_batch_tokens") as raised:
            ask(short)
    assert (raised.value.reason, raised.value.episodes) == (OUT_OF_MEMORY, {})
    short.restore(None)
    short.update(rows())
    assert same(wanted.version, saved(short, tmp_path / "short"))


def ten_times(row: Row) -> Row:
    prompt = (row.prompt_ids * 60)[: 10 * len(row.ids)]
    return msgspec.structs.replace(row, prompt_ids=prompt)


def test_row_ten_times_too_long_is_blamed_on_its_own_episode_alone(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = max(len(row.ids) for row in rows())
    made = learner(base, tmp_path, tokens=10 * most)
    loss_of = made._trainer.loss_of

    def with_little_room(batch: Sequence[Row]) -> torch.Tensor:
        if max(len(row.ids) for row in batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(batch)

    monkeypatch.setattr(made._trainer, "loss_of", with_little_room)
    first, *others = rows()
    with pytest.raises(Unusable, match="such calls, leave batch") as raised:
        made.update([ten_times(first), *others])
    assert raised.value.reason == TOO_LONG
    assert set(raised.value.episodes) == {first.episode_id}
    made.restore(None)
    made.update(others)
    assert made._budget.tokens == 10 * most


@pytest.mark.parametrize("stage", ["view", "training"])
def test_row_too_long_for_ppo_is_blamed_on_its_own_episode_alone(
    base: Base, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it could be looked at before: that takes less memory than training on it."""
    most = max(len(row.ids) for row in rows())
    made = learner(base, tmp_path, "ppo", tokens=10 * most)
    name = "initial_values" if stage == "view" else "loss_of"
    real = getattr(made._trainer, name)

    def with_little_room(batch: Sequence[Row]) -> Any:
        if max(len(row.ids) for row in batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch)

    monkeypatch.setattr(made._trainer, name, with_little_room)
    first, *others = rows()
    with pytest.raises(Unusable) as raised:
        made.update([ten_times(first), *others])
    assert (raised.value.reason, set(raised.value.episodes)) == (TOO_LONG, {first.episode_id})
    made.restore(None)


def test_row_too_long_to_be_scored_is_blamed_on_its_own_episode_alone(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities are not known: it cannot be tried by training on it."""
    most = max(len(row.ids) for row in rows())
    made = learner(base, tmp_path, tokens=10 * most)
    real = scoring.score_rows

    def with_little_room(model: Any, batch: Sequence[Row], **options: Any) -> Any:
        if max(len(row.ids) for row in batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, batch, **options)

    monkeypatch.setattr("trainer.learners.learner.score_rows", with_little_room)
    first, *others = [
        msgspec.structs.replace(row, sampled_logprobs=(), recomputed=True) for row in rows()
    ]
    with pytest.raises(Unusable) as raised:
        made.version_logprobs(None, [ten_times(first), *others])
    assert (raised.value.reason, set(raised.value.episodes)) == (TOO_LONG, {first.episode_id})


async def test_base_model_waits_for_memory_that_others_hold(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "TEST_S", 0.0)
    real, tries = model.load_base, 0

    def full_twice(*arguments: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(model, "load_base", full_twice)
    settings = TrainerSettings.model_validate({"adapter_dir": tmp_path})
    assert list(await run._load_learners(settings, ["m"], [recipe()], tiny_model)) == ["m"]
    tries = 0
    # One that would not fit into an empty machine is not waited for.
    monkeypatch.setattr("trainer.learners.model.total_memory", lambda _: 1000)
    with pytest.raises(ShortOfMemory, match="micro_batch_tokens"):
        await run._load_learners(settings, ["m"], [recipe()], tiny_model)
    assert tries == 1
