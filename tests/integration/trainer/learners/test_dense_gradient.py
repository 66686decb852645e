"""An update's gradient under every setting is that of a plain loop over all logits, in float64.

The update is a real one: a learner's, in float32, with merged prefixes, several micro-batches, a
chunked head, truncated ratios and masks that xgrammar makes. The loop has a model of its own, from
the learner's adapter, that sees a row at a time; a token's distribution follows from the settings'
definitions, and the masks of the grammar from its words.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from store.values.grammars import Grammar
from tests.integration.trainer.learners.test_replay import (
    WORDS,
    plain_shaping,
    plain_survivors,
)
from tests.support.trainer.reference import shake
from tests.support.training import PLAIN, recipe
from tests.support.training import rows as made_rows
from trainer.batches import Row
from trainer.learners import steps
from trainer.learners.kernels.head import CHUNK
from trainer.learners.kernels.process import be_deterministic
from trainer.learners.learner import Learner
from trainer.learners.replay.shaping import Vocabulary

pytestmark = pytest.mark.timeout(240)

# A token a character, after three that stand for none.
CHARACTERS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 33 + WORDS - 3))]
LETTERS, COMMA = {CHARACTERS.index(letter) for letter in "abcdef"}, CHARACTERS.index(",")
WORD_LIST = Grammar(kind="regex", text="[a-f]+(,[a-f]+)*")
CAP = 1.2
TOKENS = 7
ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.01,
    "logit_bias": ((40, 2.0), (70, -3.0), (66, 1.5)),
    "bad_words": ("ab", "c"),
    "min_tokens": 3,
    "stop_token_ids": (50,),
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
}
EACH: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.05},
    "logit_bias": {"logit_bias": ALL["logit_bias"]},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(2, 60))},
    "bad_words": {"bad_words": ("ab", "c", "!")},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (50, 51)},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "a model's card": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "grammar": {"grammar": WORD_LIST},
    "all together": ALL,
    "all together, and a grammar": ALL | {"grammar": WORD_LIST},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that prefers some characters to others."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    ids = {character: number for number, character in enumerate(CHARACTERS)}
    characters = Tokenizer(BPE(ids, [], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="</s>").save_pretrained(folder)
    return str(folder)


def able_in_a_list(stops: Sequence[int], sampled: Sequence[int], count: int) -> list[set[int]]:
    """What `WORD_LIST` allows at each place: a comma or the end only after a letter."""
    begun = [[], *(sampled[:n] for n in range(1, count))]
    return [
        LETTERS | {COMMA, *stops} if reply and reply[-1] in LETTERS else LETTERS for reply in begun
    ]


class Dense:
    """The loop: a model in float64, of one row at a time and with all logits."""

    def __init__(self, model: str, adapter: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True).double()

    def logits(self, one: Row) -> Tensor:
        """All logits before each of the row's sampled tokens, (S, V)."""
        whole: Tensor = self.model(torch.tensor([one.ids[:-1]])).logits[0]
        return whole[-len(one.sampled_ids) :]

    def sample(self, one: Row, chance: random.Random) -> Row:
        """The row with a reply that is drawn from its distribution, by the definition of that."""
        reply: list[int] = []
        while len(reply) < TOKENS and not set(one.distribution.stop_token_ids) & set(reply):
            begun = msgspec.structs.replace(one, sampled_ids=(*reply, 0))
            with torch.no_grad():
                logits = self.logits(begun)[-1]
            z, kept = plain_survivors(logits, begun, len(reply), self._able(one))
            reply += chance.choices(kept, torch.softmax(z[kept], 0).tolist())
        drawn = msgspec.structs.replace(one, sampled_ids=tuple(reply))
        with torch.no_grad():
            own = self.logprobs(drawn).tolist()
        # As if another version had sampled it: on either side of the cap.
        told = tuple(value + chance.gauss(0.0, 0.3) for value in own)
        return msgspec.structs.replace(drawn, sampled_logprobs=told)

    def logprobs(self, one: Row) -> Tensor:
        """The log-probabilities of the row's sampled tokens, (S,)."""
        shaped = [
            plain_shaping(logits, one, place, self._able(one))
            for place, logits in enumerate(self.logits(one))
        ]
        return torch.stack(shaped)

    def gradients(self, batch: Sequence[Row]) -> tuple[dict[str, Tensor], list[bool]]:
        """The gradient of the truncated loss by parameter, and where a ratio was truncated."""
        self.model.zero_grad()
        cut = []
        for one in batch:
            logprobs = self.logprobs(one)
            ratios = (logprobs.detach() - torch.tensor(one.sampled_logprobs)).exp()
            share = one.advantage * one.weight / len(one.sampled_ids)
            torch.autograd.backward((-ratios.clamp(max=CAP) * share * logprobs).sum())
            cut += (ratios > CAP).tolist()
        return gradients_of(self.model), cut

    def _able(self, one: Row) -> Any:
        stops = one.distribution.stop_token_ids
        return lambda sampled, count: able_in_a_list(stops, sampled, count)


def gradients_of(model: Any) -> dict[str, Tensor]:
    found = {
        name: parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert found
    return found


@pytest.fixture(autouse=True)
def _no_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_GRAD_NORM", 1e9)


class Prepared(NamedTuple):
    """A learner, a version of it whose adapter has an effect, and the loop for this version."""

    learner: Learner
    version: Path
    dense: Dense


@pytest.fixture(scope="module")
def prepared(model: str, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    be_deterministic()
    rule = recipe()
    changed = {
        "off_policy": rule.off_policy.model_copy(update={"ratio_cap": CAP}),
    }
    folder = tmp_path_factory.mktemp("prepared")
    made = Learner(model, rule.model_copy(update=changed), seed=0, scratch=folder)
    shake(made)
    version = folder / "1"
    version.mkdir()
    made.save(version)
    return Prepared(made, version, Dense(model, version))


def gradients_in_an_update(made: Learner, batch: Sequence[Row]) -> dict[str, Tensor]:
    """What the optimiser gets when the learner trains on the rows."""
    seen: list[dict[str, Tensor]] = []
    hook = made._trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(gradients_of(made._model))
    )
    made.update(batch)
    hook.remove()
    [found] = seen
    return found


def wanted_rows(settings: Sequence[dict[str, Any]]) -> list[Row]:
    """Groups of four with a prompt each, a row and more for each of the settings in turns."""
    return [
        msgspec.structs.replace(
            one, distribution=msgspec.structs.replace(PLAIN, **settings[n % len(settings)])
        )
        for n, one in enumerate(made_rows(groups=2 + len(settings) // 7))
    ]


WAYS = {name: [settings] for name, settings in EACH.items()} | {"one batch": [*EACH.values()]}


@pytest.mark.parametrize("way", WAYS)
def test_updates_gradient_equals_a_dense_loop(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setitem(CHUNK, "cpu", 3 * WORDS)
    made, version, dense = prepared
    made.restore(version)
    chance = random.Random(0)
    spelled = Vocabulary(made._tokenizer, made._model).with_token_ids(wanted_rows(WAYS[way]))
    batch = [dense.sample(one, chance) for one in spelled]
    aim, cut = dense.gradients(batch)
    assert 0.1 < sum(cut) / len(cut) < 0.9
    found = gradients_in_an_update(made, batch)
    assert found.keys() == aim.keys()
    largest = max(float(wanted.abs().max()) for wanted in aim.values())
    differences = {name: float((found[name] - aim[name]).abs().max()) for name in aim}
    assert math.isfinite(largest)
    assert max(differences.values()) <= 1e-5 * largest, (way, differences)
