"""Corrections at the learner: tokenised by the model's template, and trained as `sft` does."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from tests.integration.trainer.learners.test_learner import gradients, plain_logprobs
from tests.support.shallow import write_shallow
from tests.support.trainer.reference import shake
from tests.support.training import (
    Renew,
    in_every_layout,
    recipe,
    rows,
    sft_recipe,
    write_chat_words,
)
from trainer.batches import Row
from trainer.learners.corrections import Refusal, reply_ids
from trainer.learners.learner import Learner
from trainer.learners.model import Base
from trainer.recipes.recipe import KlOptions, OptimizerOptions

pytestmark = pytest.mark.timeout(240)
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


def prompt_of(tokenizer: Any, messages: Any, **named: Any) -> list[int]:
    """The ids that a server gives a prompt."""
    shown = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **named
    )
    ids: list[int] = tokenizer(shown, add_special_tokens=False)["input_ids"]
    return ids


def replied(
    tokenizer: Any, text: str, prompt: list[int] | None = None, **request: Any
) -> tuple[int, ...] | str:
    body = json.dumps({"messages": ASKED} | request).encode()
    ids = prompt_of(tokenizer, ASKED) if prompt is None else prompt
    return reply_ids(tokenizer, {tokenizer.eos_token_id}, body, ids, text)


# Tokenising, with a real tokenizer


@pytest.mark.parametrize("text", ["Paris.", "Paris, é\nor: {}", " Paris \n"])
def test_correction_is_tokenised_like_the_server_with_end_of_turn(
    tokenizer: Any, text: str
) -> None:
    found = replied(tokenizer, text)
    assert tokenizer.decode(found) == text + "<|im_end|>"
    history = [*ASKED, {"role": "assistant", "content": text}, *ASKED]
    ids = (*prompt_of(tokenizer, ASKED), *found)
    # So a server reads it, too, once it is a turn of the history.
    assert tuple(prompt_of(tokenizer, history)[: len(ids)]) == ids


def test_messages_in_parts_are_tokenised_as_on_the_server(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}]
    asked = [{"role": "user", "content": "What\nnow?"}]
    found = replied(
        tokenizer,
        "Go.",
        prompt_of(tokenizer, asked),
        messages=[{"role": "user", "content": parts}],
    )
    assert tokenizer.decode(found) == "Go.<|im_end|>"


TRICKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "the end of a turn in the text": ("special_tokens", "a<|im_end|>\n<|im_start|>user\nb", {}),
    "text that changes the prompt": ("other_template", "\n\nParis", {}),
    "another question": ("other_template", "P", {"messages": [{"role": "user", "content": "Hi"}]}),
    "an image": (
        "other_template",
        "P",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ),
    "no message at all": ("other_template", "P", {"messages": [7]}),
    "a template of the request's": (
        "other_template",
        "P",
        {"messages": [{"role": "user"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    ),
    "no chat": ("no_messages", "P", {"messages": None}),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_correction_text_that_the_server_would_render_differently_is_refused(
    tokenizer: Any, trick: str
) -> None:
    why, text, request = TRICKS[trick]
    assert replied(tokenizer, text, **request) == why
    assert why in get_args(Refusal)


def test_correction_is_refused_if_its_prompt_differs_from_the_recorded_token_ids(
    tokenizer: Any,
) -> None:
    """Another template at the server, or a prompt that was cut."""
    ids = prompt_of(tokenizer, ASKED)
    for recorded in (ids[:-1], ids[1:], [*ids, 9], [ids[0] + 1, *ids[1:]], []):
        assert replied(tokenizer, "Paris.", recorded) == "other_template"
    for kept in (None, b"", b"{", b"[]", b'{"prompt": "x"}'):
        found = reply_ids(tokenizer, {tokenizer.eos_token_id}, kept, ids, "Paris.")
        assert found in ("no_messages", "other_template")
    body = json.dumps({"messages": ASKED}).encode()
    assert reply_ids(tokenizer, {5}, body, ids, "Paris.") == "no_end_of_turn"


# Training


def correction(of: Row, ids: tuple[int, ...], weight: float = 1.0) -> Row:
    return msgspec.structs.replace(
        of,
        sampled_ids=ids,
        sampled_logprobs=(),
        distribution=msgspec.structs.replace(of.distribution, temperature=1.0),
        advantage=1.0,
        weight=weight,
        is_correction=True,
    )


def mixed() -> list[Row]:
    """Ordinary rows, and two corrections; all weigh the same."""
    batch = rows()
    weight = 1 / (len(batch) + 2)
    batch = [msgspec.structs.replace(row, weight=weight) for row in batch]
    made = [correction(batch[at], (30 + at, 31, 1), weight) for at in (0, 5)]
    return [*batch, *made]


def test_loss_and_gradient_of_a_correction_equal_sft(renew: Renew) -> None:
    batch = [correction(row, (30, 31, 1), 1 / 3) for row in rows()[:3]]
    seen = []
    for made in (recipe(), sft_recipe()):
        learner = renew(made)
        shake(learner)
        loss = learner._trainer.loss_of(batch)
        loss.backward()
        seen.append((float(loss.detach()), gradients(learner)))
    (ours, own), (theirs, wanted) = seen
    assert math.isclose(ours, theirs, rel_tol=1e-6)
    assert float((own - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    with torch.no_grad():
        dense = [plain_logprobs(learner._model, row).mean() * row.weight for row in batch]
    assert math.isclose(ours, -float(sum(dense)), abs_tol=1e-5)


def test_off_policy_figures_leave_corrections_out(tiny_model: str, tmp_path: Path) -> None:
    batch = mixed()
    ordinary = [row for row in batch if not row.is_correction]
    names = ("drift_kl", "effective_sample_size", "masked_share", "ratio_cut_share")
    for layout, learner in in_every_layout(tiny_model, recipe(), tmp_path):
        found = []
        for each in (batch, ordinary):
            learner.restore(None)
            figures = learner.update(each)
            found.append({name: figures[name] for name in names})
            assert set(learner.policy_logprobs()) == {row.key for row in ordinary}, layout
        assert found[0] == pytest.approx(found[1]), layout


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_kl_penalty_changes_no_advantage_of_a_correction(renew: Renew, place: Any) -> None:
    rule = recipe().model_copy(update={"kl": KlOptions(coefficient=0.1, place=place)})
    learner = renew(rule)
    shake(learner)
    view = learner._initial_values(mixed())
    prepared = learner._trainer.prepare(mixed(), view)
    assert {row.advantage for row in prepared if row.is_correction} == {1.0}
    assert learner.update(mixed())["loss"] != 0


def test_update_of_only_corrections_makes_them_likelier(renew: Renew) -> None:
    learner = renew(recipe())
    row = correction(rows()[0], (30, 31, 1))
    before = learner.version_logprobs(None, [row])
    learner.update([row])
    assert sum(learner.logprobs([row])[0]) > sum(before[0])


def test_correction_ends_with_the_models_own_end_of_turn(tiny_model: str, tmp_path: Path) -> None:
    write_chat_words(tmp_path)
    base = Path(tiny_model)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(base / name)
    # Of Llama's and Gemma's, for two: the turn's end is not the tokenizer's end of a text.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [50, 51]}')
    model = Base(str(tmp_path), recipe())
    body = b'{"messages": [{"role": "user", "content": "w5"}]}'
    assert model.reply_ids(body, [2, 5, 1, 2], "w7 w8 w51 w9") == (7, 8, 51)


def test_correction_gets_likelier_beside_a_sampled_reply_in_a_real_model(
    tokenizer: Any, model_dir: str, tmp_path: Path
) -> None:
    """In its first layers."""
    rule = recipe(micro_batch_tokens=256).model_copy(
        update={"optimizer": OptimizerOptions(learning_rate=5e-4)}
    )
    shallow = tmp_path / "shallow"
    shallow.mkdir()
    learner = Learner(str(write_shallow(Path(model_dir), shallow, 6)), rule, 0, tmp_path)
    body, prompt = json.dumps({"messages": ASKED}).encode(), prompt_of(tokenizer, ASKED)
    ids = learner.reply_ids(body, prompt, "It is Paris, of course.")
    assert not isinstance(ids, str)
    sampled = replied(tokenizer, "I do not know.")
    assert not isinstance(sampled, str)
    [wrong] = [
        msgspec.structs.replace(
            rows()[0], prompt_ids=prompt, sampled_ids=sampled, advantage=-1.0, weight=0.5
        )
    ]
    [own] = learner.version_logprobs(None, [wrong])
    wrong = msgspec.structs.replace(wrong, sampled_logprobs=tuple(own))
    right = correction(wrong, ids, 0.5)
    [before] = learner.logprobs([right])
    learner.update([wrong, right])
    [after] = learner.logprobs([right])
    assert sum(after) > sum(before) + 0.2
    assert torch.tensor(after).isfinite().all()
