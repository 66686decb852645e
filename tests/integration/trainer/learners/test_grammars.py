"""The masks of a grammar are vLLM's: its own backend, schema by schema and token by token."""

import builtins
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import xgrammar
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store.values.grammars import Grammar
from store.values.sampling import Distribution
from tests.support.training import PLAIN, Renew, by_every_layout, recipe, rows
from trainer.errors import Unreplayable
from trainer.learners.replay.grammars import (
    GRAMMAR_NOT_BUILT,
    OUTSIDE_GRAMMAR,
    Grammars,
    allowed_tokens,
    ebnf_of,
    is_lark,
    needs_other_library,
)
from trainer.learners.replay.shaping import History, score_shaped, shape

# Importing vLLM takes its time.
pytestmark = pytest.mark.timeout(240)

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
KINDS = {
    "json": Grammar(kind="json", text=json.dumps(SCHEMA)),
    "regex": Grammar(kind="regex", text=r"[a-z]{2,9} (Paris|Lyon)\."),
    "choice": Grammar(kind="choice", text=json.dumps(["Paris", "Par", 'a "b"\n', "\x01\\"])),
    "ebnf": Grammar(kind="grammar", text='root ::= "In " [a-z]+ "."'),
    "lark": Grammar(kind="grammar", text='start: "In " /[a-z]+/ "."'),
}


def held(grammar: Grammar, stops: tuple[int, ...]) -> Distribution:
    return msgspec.structs.replace(PLAIN, grammar=grammar, stop_token_ids=stops)


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_grammar_mask_equals_that_of_vllms_backend(
    vllm_own: Any, grammars: Grammars, tokenizer: Any, kind: str
) -> None:
    """Of replies that are sampled at random from what the backend allows, to the end and past."""
    config: Any = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=None,
        speculative_config=None,
    )
    backend = vllm_own.backend.XgrammarBackend(config, tokenizer=tokenizer, vocab_size=49152)
    said = KINDS[kind]
    text = json.loads(said.text) if kind == "choice" else said.text
    asked = vllm_own.Params(**{said.kind: text})
    vllm_own.backend.validate_xgrammar_grammar(vllm_own.SamplingParams(structured_outputs=asked))
    chance = random.Random(kind)
    for _ in range(4):
        stops = (tokenizer.eos_token_id, 28)
        grammar = backend.compile_grammar(*vllm_own.key(asked), stop_token_ids=set(stops))
        bits, reply, masks = backend.allocate_token_bitmask(1), [], []
        for _ in range(30):
            if grammar.is_terminated():
                bits.fill_(-1)
            else:
                grammar.fill_bitmask(bits, 0)
            masks.append(bits.numpy().tobytes())
            able = (
                allowed_tokens(masks[-1:], 49152, torch.device("cpu"))[0].nonzero()[:, 0].tolist()
            )
            reply.append(chance.choice(able))
            assert grammar.accept_tokens("r", reply[-1:])
        assert list(grammars.masks(held(said, stops), reply)) == masks


def test_a_reply_outside_its_grammar_is_not_replayed(grammars: Grammars, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    inside, outside = tokenizer.encode('{"b": "x"}'), tokenizer.encode("Paris")
    asked = held(KINDS["json"], (end,))
    assert grammars.why_no_masks(asked, [*inside, end]) is None
    assert grammars.why_no_masks(asked, inside[:-1]) is None
    assert grammars.why_no_masks(asked, outside) == OUTSIDE_GRAMMAR
    # An end where the grammar has none.
    assert grammars.why_no_masks(asked, [*inside[:-1], end]) == OUTSIDE_GRAMMAR
    with pytest.raises(Unreplayable, match="token 0 of the reply is outside"):
        list(grammars.masks(asked, outside))


@pytest.mark.parametrize(
    "grammar",
    [
        *(Grammar(kind="json", text=text) for text in ("{", "7", '{"type": "nothing"}')),
        Grammar(kind="json", text='{"type": "integer", "multipleOf": 2}'),
        Grammar(kind="regex", text="(a"),
        *(Grammar(kind="choice", text=text) for text in ("7", "[1]", "")),
        *(Grammar(kind="grammar", text=text) for text in ("root ::= x", "start: y")),
    ],
)
def test_grammar_refused_by_xgrammar_is_not_replayed(grammars: Grammars, grammar: Grammar) -> None:
    assert grammars.why_no_masks(held(grammar, ()), [5]) == GRAMMAR_NOT_BUILT


def test_without_xgrammar_no_constrained_reply_is_replayed(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "xgrammar":
            raise ImportError("not there")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    made = Grammars(tokenizer, 49152)
    assert made.why_no_masks(held(KINDS["json"], ()), [5]) == GRAMMAR_NOT_BUILT


def test_token_ids_beyond_the_vocabulary_raise_no_error(grammars: Grammars, tokenizer: Any) -> None:
    end, inside = tokenizer.eos_token_id, tokenizer.encode('{"b": "x"}')
    asked = held(KINDS["json"], (end,))
    for odd in (49152, 10**6, 2**31 - 1):
        assert grammars.why_no_masks(asked, [inside[0], odd]) == OUTSIDE_GRAMMAR
        stopping = held(KINDS["json"], (end, odd))
        assert grammars.why_no_masks(stopping, [*inside, end]) in (None, GRAMMAR_NOT_BUILT)
    # After its end a reply may go on: `ignore_eos`.
    assert grammars.why_no_masks(asked, [*inside, end, odd]) is None


LEAVES = st.sampled_from(
    [
        *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "object")),
        *({"enum": ["a", "é", 7]}, {"const": "x y"}, {"type": "string", "maxLength": 3}, {}),
        *({"type": "string", "pattern": "^[a-c]{1,4}$"}, {"type": "string", "format": "date"}),
        *({"type": "integer", "minimum": -3, "maximum": 120}, {"type": ["string", "null"]}),
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(
            lambda properties, count, more: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:count],
                "additionalProperties": more,
            },
            st.dictionaries(st.sampled_from(["a", "b b", "é"]), inner, max_size=3),
            st.integers(0, 3),
            st.booleans(),
        )
        | st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least},
            inner,
            st.integers(0, 2),
        )
        | st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=49152)
    return xgrammar.GrammarCompiler(info)


def walk(compiled: Any, end: int, chance: random.Random) -> tuple[list[int], list[Any]]:
    """A reply that xgrammar lets through, with logits (V,) before each token, masked by it too."""
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[end])
    bits, reply, seen = xgrammar.allocate_token_bitmask(1, 49152), [], []
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    while len(reply) < 20 and not matcher.is_terminated():
        matcher.fill_next_token_bitmask(bits)
        logits = torch.randn(1, 49152, generator=generator) * 3
        seen.append((logits[0].clone(), logits[0]))
        xgrammar.apply_token_bitmask_inplace(logits, bits)
        able = torch.nonzero(logits[0] > -math.inf)[:, 0]
        # The likely ones, so that the walk comes to an end more often.
        best = able[logits[0, able].topk(min(5, len(able))).indices].tolist()
        reply.append(end if end in able and chance.random() < 0.5 else chance.choice(best))
        assert matcher.accept_token(reply[-1])
    return reply, seen


@settings(max_examples=20)
@given(schema=SCHEMAS, chance=st.randoms(use_true_random=False), heat=st.sampled_from([0.5, 1.0]))
def test_every_reply_allowed_by_a_schema_is_replayed(
    grammars: Grammars, tokenizer: Any, compiler: Any, schema: Any, chance: Any, heat: float
) -> None:
    """Each sampled token survives its mask, and has its probability among all that do."""
    end, text = tokenizer.eos_token_id, json.dumps(schema)
    reply, seen = walk(compiler.compile_json_schema(text), end, chance)
    asked = msgspec.structs.replace(held(Grammar(kind="json", text=text), (end,)), temperature=heat)
    assert grammars.why_no_masks(asked, reply) is None
    [one] = grammars.with_masks(
        [msgspec.structs.replace(rows()[0], sampled_ids=tuple(reply), distribution=asked)]
    )
    at, labels = torch.arange(len(reply)), torch.tensor(reply)
    assert allowed_tokens(one.masks, 49152, at.device)[at, labels].all()

    history = History.at_places([one], [(0, place) for place in range(len(reply))], at.device)
    shaped = shape(torch.stack([logits for logits, _ in seen]), asked, history, at, labels)
    found = score_shaped(shaped, at, labels)
    masked = torch.stack([logits for _, logits in seen]).double()
    dense = torch.log_softmax(masked / heat, -1)
    assert float((found.logprobs - dense[at, labels]).abs().max()) <= 1e-5
    assert float((found.weights - dense.exp()).abs().max()) <= 1e-5
    # A token that a mask forbids makes the call one that is not trained.
    place = chance.randrange(len(reply))
    other = torch.nonzero(masked[place] == -math.inf)[:, 0]
    if len(other):
        changed = [*reply[:place], int(chance.choice(other)), *reply[place + 1 :]]
        assert grammars.why_no_masks(asked, changed) == OUTSIDE_GRAMMAR


def test_equal_grammar_masks_share_an_object(grammars: Grammars, tokenizer: Any) -> None:
    reply = tokenizer.encode('{"b": "one two three four five six"}')
    [made] = grammars.with_masks(
        [
            msgspec.structs.replace(
                rows()[0],
                sampled_ids=tuple(reply),
                distribution=held(KINDS["json"], (tokenizer.eos_token_id,)),
            )
        ]
    )
    assert len(made.masks) == len(reply)
    assert len({id(mask) for mask in made.masks}) == len(set(made.masks)) < len(reply)


PARTS = st.recursive(
    st.sampled_from(["string", "integer", "object", "array", "email", "odd", 3, True, None, {}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("type", "multipleOf", "uniqueItems", "contains", "format", "pattern"),
                    *("minLength", "propertyNames", "patternProperties", "properties"),
                    *("unevaluatedProperties", "allOf", "items", "x"),
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@example(
    schema={
        "type": [{"type": "string", "format": "string"}],
        "allOf": {"type": "string", "format": []},
    }
)
@given(
    schema=st.dictionaries(st.sampled_from(["type", "allOf", "format", "properties", "x"]), PARTS)
)
def test_json_schemas_count_as_unsupported_by_xgrammar_exactly_as_in_vllm(
    vllm_own: Any, schema: Any
) -> None:
    try:
        theirs = vllm_own.backend.has_xgrammar_unsupported_json_features(schema)
    except TypeError:
        # A format that is a list: vLLM refuses the request.
        return
    assert needs_other_library(schema) == theirs


@given(st.lists(st.text(), min_size=1, max_size=3), st.text("ab:=#/\n ", max_size=20))
def test_choice_constraints_become_the_same_grammar_as_in_vllm(
    vllm_own: Any, choices: list[str], text: str
) -> None:
    assert ebnf_of(choices) == vllm_own.utils.choice_as_grammar(choices)
    if text:
        assert is_lark(text) == vllm_own.utils.grammar_is_likely_lark(text)


def test_learner_trains_on_replies_under_a_grammar(
    renew: Renew, tiny_model: str, tmp_path: Path
) -> None:
    """The words of the tiny model, one after the other; its gradient is that of separate rows."""
    grammar = Grammar(kind="regex", text="(w[0-9]{1,2})+")
    batch = [
        msgspec.structs.replace(one, distribution=msgspec.structs.replace(PLAIN, grammar=grammar))
        for one in rows()
    ]
    tiny = renew(recipe())
    assert tiny.why_unreplayable(batch[0].distribution, batch[0].sampled_ids) is None
    assert tiny.why_unreplayable(batch[0].distribution, [200]) == OUTSIDE_GRAMMAR
    by_every_layout(tiny_model, recipe(), batch, tmp_path)
