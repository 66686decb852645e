"""What a real vLLM sampled under grammars has the probabilities that the trainer computes."""

import asyncio
from typing import Any

import pytest

from pawl.stack.stack import Stack
from store.records import TransitionRow
from tests.e2e.conftest import POLICY, ShowNats
from tests.e2e.replaying import (
    ALL,
    assert_alike,
    post,
    recomputed_differences,
    recorded_calls,
    row_of,
    trainers_differences,
)
from trainer.learners.learner import Learner
from trainer.learners.replay.grammars import OUTSIDE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "river": {"type": "string"},
        "food": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "area": {"type": "number"},
    },
    "required": ["river", "food"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}}
LOOK_UP = {"name": "look_up", "description": "Looks a word up.", "parameters": SCHEMA}
TOOLS = [
    {"type": "function", "function": LOOK_UP},
    {"type": "function", "function": {"name": "give_up", "parameters": None}},
]
STRICT = [{"type": "function", "function": LOOK_UP | {"strict": True}}]
NAMED = {"type": "function", "function": {"name": "look_up"}}
EBNF = 'root ::= "In " city " there is " [a-z ]+ "."\ncity ::= "Paris" | "Lyon"'
CHAT: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": FORM},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema and all settings": {"response_format": FORM, **ALL},
    "regex": {"structured_outputs": {"regex": r"(Paris|Lyon|\w{3,12}), [0-9]{1,4} (km|miles)"}},
    "choice": {"structured_outputs": {"choice": ["Paris", "Par", "The river\n", 'a "b"']}},
    "grammar": {"structured_outputs": {"grammar": EBNF}},
    "json": {"structured_outputs": {"json": SCHEMA}, "stop_token_ids": [28, 30]},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "one required": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "strict and required": {"tools": STRICT, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
}
QUESTION = "Tell me about the capital of France, the river there and the food."
MESSAGES = [{"role": "user", "content": QUESTION}]
ANTHROPIC = [{"name": "look_up", "input_schema": SCHEMA}]
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("completions", {"prompt": QUESTION, "response_format": FORM}),
    "responses": (
        "responses",
        {
            "input": QUESTION,
            "text": {"format": {"type": "json_schema", "name": "capital", "schema": SCHEMA}},
        },
    ),
    "messages": (
        "messages",
        {"messages": MESSAGES, "tools": ANTHROPIC, "tool_choice": {"type": "any"}},
    ),
}
EACH = {name: ("chat/completions", {"messages": MESSAGES, **said}) for name, said in CHAT.items()}
EACH |= OTHERS
# Streamed texts without their end's log-probability, and calls alone, which have none; with what
# is sampled alike and has all.
FLAT_LOOK_UP = {"type": "function", **LOOK_UP}
SHORT = {"type": "json_schema", "name": "size", "schema": {"enum": ["big", "small", "a town"]}}
SILENT: dict[str, tuple[dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "a form, streamed": (
        {"text": {"format": SHORT}, "stream": True},
        ("responses", {"input": QUESTION, "text": {"format": SHORT}}),
    ),
    "a call": (
        {"tools": [FLAT_LOOK_UP], "tool_choice": "required"},
        ("chat/completions", EACH["required"][1] | {"tools": TOOLS[:1]}),
    ),
}


async def ask(stack: Stack, name: str, seed: int) -> None:
    path, said = EACH[name]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {"model": POLICY, limit: 32, "temperature": 1.0, **said}
    if path != "messages":
        body["seed"] = seed
    await post(stack, path, body, f"{name}-{seed}")


async def test_each_grammar_is_replayed_to_a_thousandth_of_a_nat(
    stack: Stack, learner: Learner, show_nats: ShowNats
) -> None:
    seeds = range(2)
    # At once: the server makes the masks of a whole batch.
    await asyncio.gather(*(ask(stack, name, seed) for name in EACH for seed in seeds))
    wanted = {f"{name}-{seed}": name for name in EACH for seed in seeds}
    calls, folders = await recorded_calls(stack, wanted)
    assert {call.reason for own in calls.values() for call in own} == {None}
    means = trainers_differences(learner, calls, folders)
    show_nats(means)
    assert max(means.values()) <= 1e-3, means

    held, other = (row_of(calls[name][0]) for name in ("json_schema", "regex"))
    assert learner.why_unreplayable(held.distribution, held.sampled_ids) is None
    assert learner.why_unreplayable(held.distribution, other.sampled_ids) == OUTSIDE


async def ask_twice(stack: Stack, name: str, seed: int) -> None:
    """In a way that gives no log-probabilities, and in one that does."""
    silent, (path, twin) = SILENT[name]
    body = {"model": POLICY, "temperature": 0.9, "seed": seed, "top_p": 0.9}
    short = {"max_output_tokens": 48}
    await post(stack, "responses", body | short | {"input": QUESTION} | silent, f"{name}-{seed}")
    limits = short if path == "responses" else {"max_tokens": 48}
    await post(stack, path, body | limits | twin, f"{name}-{seed}, told")


async def silent_pairs(
    stack: Stack, name: str, start: int
) -> tuple[list[tuple[TransitionRow, TransitionRow]], dict[int, str | None]]:
    """Return those of three pairs whose first call has no log-probabilities."""
    seeds = range(start, start + 3)
    await asyncio.gather(*(ask_twice(stack, name, seed) for seed in seeds))
    keys = [(f"{name}-{seed}", f"{name}-{seed}, told") for seed in seeds]
    calls, folders = await recorded_calls(stack, {key: key for pair in keys for key in pair})
    assert {call.reason for own in calls.values() for call in own} == {None}
    both = [(calls[silent][0], calls[told][0]) for silent, told in keys]
    for call, twin in both:
        assert_alike(call, twin)
    return [(call, twin) for call, twin in both if not call.tokens.sampled_logprobs], folders


async def test_what_comes_without_log_probabilities_is_recomputed_to_a_thousandth_of_a_nat(
    stack: Stack, learner: Learner, show_nats: ShowNats
) -> None:
    pairs = {}
    folders: dict[int, str | None] = {}
    for name in SILENT:
        # A busy server puts a stream's last text and its end into one event, whose
        # log-probabilities are complete: then others are asked.
        for start in range(0, 60, 3):
            pairs[name], folders = await silent_pairs(stack, name, start)
            if pairs[name]:
                break
        assert pairs[name], name
    differences = recomputed_differences(learner, pairs, folders)
    show_nats(differences)
    assert max(differences.values()) <= 1e-3, differences
