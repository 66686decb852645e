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

from store.values.grammars import Grammar
from store.values.sampling import Distribution
from tests.integration.trainer.learners.test_learner import plain_logprobs
from tests.integration.trainer.recovery.test_resuming import same
from tests.integration.trainer.test_recomputed import filled, learner, lineage, saved, without
from tests.support.training import PLAIN, recipe, rows
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
HEATS = st.sampled_from([0.6, 1.0, 1.4])


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
def versions(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return lineage(tiny_model, tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module", params=LAYOUTS)
def made(
    tiny_model: str, tmp_path_factory: pytest.TempPathFactory, request: Any, versions: list[Path]
) -> Learner:
    scratch = tmp_path_factory.mktemp("made")
    found = Learner(tiny_model, recipe(steps=2), 0, scratch, layouts=(request.param, request.param))
    found.restore(versions[-1])
    return found


@settings(max_examples=30)
@given(
    which=st.sampled_from(sorted(GRAMMARS)),
    chance=st.randoms(use_true_random=False),
    heat=HEATS,
    penalty=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([0, 40]),
    version=st.sampled_from([0, 1, 2]),
)
def test_any_reply_under_a_grammar_is_recomputed_as_by_a_dense_masked_reference(
    made: Learner,
    versions: list[Path],
    which: str,
    chance: random.Random,
    heat: float,
    penalty: float,
    top_k: int,
    version: int,
) -> None:
    folder = [None, *versions][version]
    grammar = compiled(GRAMMARS[which], made._tokenizer)
    asked = Distribution(
        temperature=heat,
        presence_penalty=penalty,
        top_k=top_k,
        grammar=GRAMMARS[which],
        stop_token_ids=ENDS,
    )
    walks = [walk(grammar, chance) for _ in range(4)]
    batch = [
        msgspec.structs.replace(row, sampled_ids=reply, distribution=asked)
        for row, (reply, _) in zip(without(rows()[:4], version), walks, strict=True)
    ]
    assert all(made.why_unreplayable(asked, row.sampled_ids) is None for row in batch)
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
    tiny_model: str, tmp_path: Path
) -> None:
    one, two = lineage(tiny_model, tmp_path)
    made = learner(tiny_model, tmp_path)
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
    again = learner(tiny_model, tmp_path)
    again.restore(two)
    again.update(filled(batch, values))
    assert same(saved(made, tmp_path / "made"), saved(again, tmp_path / "again"))


def test_a_reply_outside_its_grammar_is_not_recomputed(tiny_model: str, tmp_path: Path) -> None:
    asked = msgspec.structs.replace(PLAIN, grammar=GRAMMARS["choice"], stop_token_ids=ENDS)
    [row] = without(rows()[:1], 0)
    row = msgspec.structs.replace(row, sampled_ids=(5, 6, 9), distribution=asked)
    made = learner(tiny_model, tmp_path)
    assert made.why_unreplayable(asked, row.sampled_ids) == "outside_grammar"
    with pytest.raises(Unreplayable):
        made.version_logprobs(None, [row])
