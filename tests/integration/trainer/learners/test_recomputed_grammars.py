"""Rows under a grammar are recomputed with its mask, by the version that sampled them."""

import math
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from store.values.grammars import Grammar
from store.values.sampling import Distribution
from tests.integration.trainer.learners.test_learner import plain_logprobs
from tests.integration.trainer.recovery.test_resuming import same
from tests.integration.trainer.test_recomputed import filled, lineage, saved, without
from tests.support.training import PLAIN, Renew, recipe, rows
from trainer.batches import LAYOUTS, Row
from trainer.errors import Unreplayable
from trainer.learners.learner import Learner

# The tokenizer's end, and the model's.
WORDS, ENDS = 97, (1, 2)
EBNF = 'root ::= "w5" (digit | "w1" [0-9])* "w8"\ndigit ::= "w3" | "w7"'
GRAMMARS = {
    "words": Grammar(kind="regex", text="(w[0-9]{1,2})+"),
    "some words": Grammar(kind="regex", text="(w[2-4]){2,9}w[5-9]*"),
    "choice": Grammar(kind="choice", text='["w5w6w7", "w5w8", "w4w3w7w7"]'),
    "ebnf": Grammar(kind="grammar", text=EBNF),
}


def compiled(grammar: Grammar, tokenizer: Any) -> Any:
    """The grammar, made without any of ours."""
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=WORDS)
    )
    if grammar.kind == "regex":
        return compiler.compile_regex(grammar.text)
    if grammar.kind == "grammar":
        return compiler.compile_grammar(grammar.text)
    listed = grammar.text.strip("[]").replace(", ", " | ")
    return compiler.compile_grammar(f"root ::= {listed}")


def walk(grammar: Any, chance: random.Random) -> tuple[tuple[int, ...], torch.Tensor]:
    """A reply that xgrammar lets through, and which words it let through before each, (S, V)."""
    matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=list(ENDS))
    bits, reply, able = xgrammar.allocate_token_bitmask(1, WORDS), [], []
    while len(reply) < 9 and not matcher.is_terminated():
        bits.fill_(-1)
        matcher.fill_next_token_bitmask(bits)
        one = torch.zeros(1, WORDS)
        xgrammar.apply_token_bitmask_inplace(one, bits)
        able.append(one[0] > -math.inf)
        reply.append(chance.choice(able[-1].nonzero()[:, 0].tolist()))
        assert matcher.accept_token(reply[-1])
    return tuple(reply), torch.stack(able)


def dense(model: Any, row: Row, able: torch.Tensor) -> torch.Tensor:
    """In vLLM's order: mask, penalty, temperature, the `top_k` best, and what was drawn."""
    asked, labels = row.distribution, torch.tensor(row.sampled_ids)
    logits = model(input_ids=torch.tensor([row.inputs])).logits[0, -len(labels) :].double()
    logits = logits.masked_fill(~able, -math.inf)
    for place in range(len(labels)):
        logits[place, sorted(set(row.sampled_ids[:place]))] -= asked.presence_penalty
    logits /= asked.temperature
    drawn = logits.gather(1, labels[:, None])
    if asked.top_k:
        logits[logits < logits.topk(asked.top_k).values[:, -1:]] = -math.inf
        logits.scatter_(1, labels[:, None], drawn)
    return torch.log_softmax(logits, -1).gather(1, labels[:, None])[:, 0]


@pytest.fixture(scope="module")
def versions(renew: Renew, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return lineage(renew(recipe(steps=2)), tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def grammars(tiny_model: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return {name: compiled(grammar, tokenizer) for name, grammar in GRAMMARS.items()}


@pytest.fixture(scope="module", params=LAYOUTS)
def made(
    tiny_model: str, tmp_path_factory: pytest.TempPathFactory, request: Any, versions: list[Path]
) -> Learner:
    scratch = tmp_path_factory.mktemp("made")
    found = Learner(tiny_model, recipe(steps=2), 0, scratch, layouts=(request.param,))
    found.restore(versions[-1])
    return found


# The settings of one reply; the four of an example need not be alike.
ASKED = st.fixed_dictionaries(
    {
        "which": st.sampled_from(sorted(GRAMMARS)),
        "temperature": st.sampled_from([0.6, 1.0, 1.4]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "top_k": st.sampled_from([0, 40]),
    }
)


@settings(max_examples=10)
@given(
    replies=st.lists(ASKED, min_size=4, max_size=4),
    chance=st.randoms(use_true_random=False),
    version=st.sampled_from([0, 1, 2]),
)
def test_any_reply_under_a_grammar_is_recomputed_as_by_a_dense_masked_reference(
    made: Learner,
    versions: list[Path],
    grammars: dict[str, Any],
    replies: list[dict[str, Any]],
    chance: random.Random,
    version: int,
) -> None:
    folder = [None, *versions][version]
    walks, batch = [], []
    for row, reply in zip(without(rows()[:4], version), replies, strict=True):
        named = {name: value for name, value in reply.items() if name != "which"}
        asked = Distribution(**named, grammar=GRAMMARS[reply["which"]], stop_token_ids=ENDS)
        walks.append(walk(grammars[reply["which"]], chance))
        batch.append(msgspec.structs.replace(row, sampled_ids=walks[-1][0], distribution=asked))
    assert all(made.why_unreplayable(row.distribution, row.sampled_ids) is None for row in batch)
    # One that nothing held, among them.
    [free] = without(rows()[4:5], version)
    *found, unheld = made.version_logprobs(folder, [*batch, free])
    made._model.eval()
    with torch.no_grad(), made._model.disable_adapter() if folder is None else nullcontext():
        wanted = [
            dense(made._model, row, able) for row, (_, able) in zip(batch, walks, strict=True)
        ]
        plain = [plain_logprobs(made._model, row) for row in (*batch, free)]
    for ours, theirs in zip([*found, unheld], [*wanted, plain[4]], strict=True):
        assert float((torch.tensor(ours) - theirs).abs().max()) <= 1e-5
    # The mask does matter: no first token may end a reply, and nothing else came before it.
    assert all(ours[0] > float(one[0]) for ours, one in zip(found, plain, strict=False))


def test_recomputing_rows_under_a_grammar_does_not_change_the_following_update(
    renew: Renew, tmp_path: Path, versions: list[Path]
) -> None:
    one, two = versions
    made = renew(recipe(steps=2))
    asked = msgspec.structs.replace(PLAIN, grammar=GRAMMARS["words"], stop_token_ids=ENDS)
    batch = [
        msgspec.structs.replace(row, distribution=asked)
        for row in without(rows()[:6], 2) + without(rows()[6:], 1)
    ]
    made.restore(two)
    values = [*made.version_logprobs(two, batch[:6]), *made.version_logprobs(one, batch[6:])]
    made.restore(two)
    metrics = made.update(filled(batch, values))
    assert (metrics["recomputed_rows"], metrics["drift_kl"]) == (len(batch), None)
    after = saved(made, tmp_path / "made")
    again = renew(recipe(steps=2))
    again.restore(two)
    again.update(filled(batch, values))
    assert same(after, saved(again, tmp_path / "again"))


def test_a_reply_outside_its_grammar_is_not_recomputed(renew: Renew) -> None:
    asked = msgspec.structs.replace(PLAIN, grammar=GRAMMARS["choice"], stop_token_ids=ENDS)
    [row] = without(rows()[:1], 0)
    row = msgspec.structs.replace(row, sampled_ids=(5, 6, 9), distribution=asked)
    made = renew(recipe())
    assert made.why_unreplayable(asked, row.sampled_ids) == "outside_grammar"
    with pytest.raises(Unreplayable):
        made.version_logprobs(None, [row])
