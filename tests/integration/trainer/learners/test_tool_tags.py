"""The masks of calls in a model's own syntax are vLLM's: its own tags, through its own backend."""

import json
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from proxy.formats.sampling import TAGS
from store.values.grammars import Choice, Grammar, OfferedTool, ToolTag, text_of_tag
from store.values.sampling import Distribution
from tests.support.training import PLAIN
from trainer.learners.replay.grammars import (
    GRAMMAR_NOT_BUILT,
    OUTSIDE_GRAMMAR,
    Grammars,
    allowed_tokens,
)

# Importing vLLM takes its time.
pytestmark = pytest.mark.timeout(240)

WORDS = 49152
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lyon"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
HELD = OfferedTool(name="weather", parameters=SCHEMA)
FREE = OfferedTool(name="give_up")


def tag(model: str, choice: Choice = "auto", *, one_call: bool = False) -> ToolTag:
    tools = (HELD,) if choice == "forced" else (HELD, FREE)
    return ToolTag(model=model, choice=choice, tools=tools, one_call=one_call)


def held(said: ToolTag, stops: tuple[int, ...]) -> Distribution:
    grammar = Grammar(kind="tools", text=text_of_tag(said))
    return msgspec.structs.replace(PLAIN, grammar=grammar, stop_token_ids=stops)


def vllms(said: ToolTag) -> str:
    """The tag that vLLM makes of a chat's tools, as its scheduler gets it."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionNamedToolChoiceParam,
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers.structural_tag_registry import (
        get_model_structural_tag,
        limit_to_single_tool_call,
    )
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    named = {"function": {"name": HELD.name}}
    functions = [
        {"name": HELD.name, "parameters": SCHEMA, "strict": True},
        {"name": FREE.name, "parameters": SCHEMA},
    ]
    made = get_model_structural_tag(
        said.model,
        [ChatCompletionToolsParam(function=function) for function in functions],
        ChatCompletionNamedToolChoiceParam(**named) if said.choice == "forced" else said.choice,
        reasoning=False,
        strict_level=ToolStrictLevel.FUNCTION,
    )
    assert made is not None
    return json.dumps((limit_to_single_tool_call(made) if said.one_call else made).model_dump())


def first_call(made: Any) -> str:
    """How the first call of a tag begins, without what is inside of it."""
    if isinstance(made, list):
        return next(filter(None, map(first_call, made)), "")
    if not isinstance(made, dict):
        return ""
    return made["begin"] if made.get("type") == "tag" else first_call(list(made.values()))


@pytest.fixture(scope="module")
def backend(vllm_own: Any, tokenizer: Any) -> Any:
    config: Any = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=None,
        speculative_config=None,
    )
    return vllm_own.backend.XgrammarBackend(config, tokenizer=tokenizer, vocab_size=WORDS)


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")
@pytest.mark.parametrize("one_call", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "forced"])
@pytest.mark.parametrize("model", sorted(set(TAGS.values())))
def test_every_grammar_mask_of_a_tool_call_equals_that_of_vllms_backend(
    vllm_own: Any,
    backend: Any,
    grammars: Grammars,
    tokenizer: Any,
    model: str,
    choice: Choice,
    one_call: bool,
) -> None:
    """Of replies that begin a call, and go on by chance through it and past it."""
    said = tag(model, choice, one_call=one_call)
    theirs = vllms(said)
    asked = vllm_own.Params(structural_tag=theirs)
    vllm_own.backend.validate_xgrammar_grammar(vllm_own.SamplingParams(structured_outputs=asked))
    stops = (tokenizer.eos_token_id, 28)
    chance = random.Random(f"{model} {choice} {one_call}")
    for _ in range(2):
        grammar = backend.compile_grammar(*vllm_own.key(asked), stop_token_ids=set(stops))
        bits, reply, masks = backend.allocate_token_bitmask(1), [], []
        text = "I see.\n" if choice == "auto" else ""
        coming = tokenizer.encode(text + first_call(json.loads(theirs)["format"]))
        for _ in range(60):
            if grammar.is_terminated():
                bits.fill_(-1)
            else:
                grammar.fill_bitmask(bits, 0)
            masks.append(bits.numpy().tobytes())
            able = (
                allowed_tokens(masks[-1:], WORDS, torch.device("cpu"))[0].nonzero()[:, 0].tolist()
            )
            # What a syntax begins otherwise goes on by chance at once.
            coming = coming if coming and coming[0] in set(able) else []
            reply.append(coming.pop(0) if coming else chance.choice(able))
            assert grammar.accept_tokens("r", reply[-1:])
        assert list(grammars.masks(held(said, stops), reply)) == masks
        # Something was held: most masks are not full.
        assert len(set(masks)) > 3


def test_only_replies_allowed_by_the_tool_tag_are_replayed(
    grammars: Grammars, tokenizer: Any
) -> None:
    end = tokenizer.eos_token_id

    def why(text: str, said: ToolTag) -> str | None:
        return grammars.why_no_masks(held(said, (end,)), [*tokenizer.encode(text), end])

    inside = (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon", "days": 2}}\n</tool_call>'
    )
    wrong = inside.replace("Lyon", "Rome")
    free = inside.replace("weather", "give_up").replace("Lyon", "Rome")
    for choice in ("auto", "required"):
        any_number, one = tag("hermes", choice), tag("hermes", choice, one_call=True)
        assert why(inside, any_number) is why(inside * 2, any_number) is why(free, one) is None
        assert why(wrong, any_number) == why(inside * 2, one) == OUTSIDE_GRAMMAR
    assert why("Paris.", tag("hermes")) is None
    assert why("Paris.", tag("hermes", "required")) == OUTSIDE_GRAMMAR
    assert why(inside, tag("hermes", "forced")) is None
    assert why(inside.replace("tool_call", "longcat_tool_call"), tag("longcat", "forced")) is None


@pytest.mark.parametrize(
    "text", ["", "{", "7", '{"model": "hermes"}', text_of_tag(tag("nobody's"))]
)
def test_invalid_tool_tag_is_not_replayed(grammars: Grammars, text: str) -> None:
    asked = msgspec.structs.replace(PLAIN, grammar=Grammar(kind="tools", text=text))
    assert grammars.why_no_masks(asked, [5]) == GRAMMAR_NOT_BUILT
