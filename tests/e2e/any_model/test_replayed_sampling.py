"""A real vLLM samples with the probabilities that the trainer computes, under every setting."""

import asyncio
from typing import Any

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
from trainer.learners.replay.grammars import OUTSIDE_GRAMMAR

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
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 10},
    "min_p": {"min_p": 0.05},
    "logit_bias": {"logit_bias": ALL["logit_bias"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(4000))},
    "bad_words": {"bad_words": ["the", "a", "Paris", "is"]},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": [28, 30]},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "a model's card": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "all together": ALL,
}
EACH = {
    name: ("chat/completions", {"messages": MESSAGES, **fields})
    for name, fields in (SETTINGS | CHAT).items()
}
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
    path, fields = EACH[name]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {"model": POLICY, limit: 32, "temperature": 1.0, **fields}
    if path != "messages":
        body["seed"] = seed
    await post(stack.base_url, path, body, f"{name}-{seed}")


async def test_every_setting_and_grammar_is_replayed_to_a_thousandth_of_a_nat(
    stack: Stack, learner: Learner, show_nats: ShowNats
) -> None:
    wanted = {
        f"{name}-{seed}": name for name in EACH for seed in range(3 if name in SETTINGS else 2)
    }
    # At once: the server samples a batch of which each row has settings and a mask of its own.
    await asyncio.gather(*(ask(stack, name, int(key[-1])) for key, name in wanted.items()))
    calls, folders = await recorded_calls(stack, wanted)
    assert {call.reason for own in calls.values() for call in own} == {None}
    means = trainers_differences(learner, calls, folders, ("tree", "whole"))
    show_nats(means)
    assert max(means.values()) <= 1e-3, means

    held, other = (row_of(calls[name][0]) for name in ("json_schema", "regex"))
    assert learner.why_unreplayable(held.distribution, held.sampled_ids) is None
    assert learner.why_unreplayable(held.distribution, other.sampled_ids) == OUTSIDE_GRAMMAR


async def ask_twice(stack: Stack, name: str, seed: int) -> None:
    """In a way that gives no log-probabilities, and in one that does."""
    silent, (path, twin) = SILENT[name]
    body = {"model": POLICY, "temperature": 0.9, "seed": seed, "top_p": 0.9}
    short = {"max_output_tokens": 48}
    await post(
        stack.base_url, "responses", body | short | {"input": QUESTION} | silent, f"{name}-{seed}"
    )
    limits = short if path == "responses" else {"max_tokens": 48}
    await post(stack.base_url, path, body | limits | twin, f"{name}-{seed}, twin")


async def silent_pairs(
    stack: Stack, name: str, start: int
) -> tuple[list[tuple[TransitionRow, TransitionRow]], dict[int, str | None]]:
    """Return those of three pairs whose first call has no log-probabilities."""
    seeds = range(start, start + 3)
    await asyncio.gather(*(ask_twice(stack, name, seed) for seed in seeds))
    keys = [(f"{name}-{seed}", f"{name}-{seed}, twin") for seed in seeds]
    calls, folders = await recorded_calls(stack, {key: key for pair in keys for key in pair})
    assert {call.reason for own in calls.values() for call in own} == {None}
    both = [(calls[silent][0], calls[twin][0]) for silent, twin in keys]
    for call, twin in both:
        assert_alike(call, twin)
    return [(call, twin) for call, twin in both if not call.tokens.sampled_logprobs], folders


async def test_reply_without_log_probabilities_is_recomputed_to_a_thousandth_of_a_nat(
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
