"""A real vLLM with Hermes' tool parser samples with the probabilities that the trainer computes.

The tools are strict, forced, or one at most may be called: each is held to a structural tag.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.stack import small_plan
from pawl.stack.stack import Stack
from store.records import TransitionRow
from tests.e2e.conftest import POLICY, ShowNats, serving_stack
from tests.e2e.replaying import (
    ALL,
    assert_alike,
    post,
    recomputed_differences,
    recorded_calls,
    row_of,
    trainers_differences,
)
from tests.support.training import recipe
from trainer.learners.learner import Learner
from trainer.learners.replay.grammars import OUTSIDE_GRAMMAR

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
GIVE_UP = {"name": "give_up", "parameters": {"type": "object", "properties": {}}}
FREE = [{"type": "function", "function": one} for one in (WEATHER, GIVE_UP)]
STRICT = [{"type": "function", "function": WEATHER | {"strict": True}}, FREE[1]]
ONE: dict[str, Any] = {"parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "weather"}}
# The template shows the model no tools: it learns the syntax of calls from these.
CITIES = ("Rome", "Oslo", "Lima")
EXAMPLES = [
    message
    for city in CITIES
    for message in (
        {"role": "user", "content": f"The weather of {city}, for two days?"},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "weather", "arguments": '
            f'{{"city": "{city}", "days": 2}}}}\n</tool_call>',
        },
    )
]
MESSAGES = [*EXAMPLES, {"role": "user", "content": "The weather of Paris, for two days?"}]
CHAT: dict[str, dict[str, Any]] = {
    "strict": {"tools": STRICT},
    "strict, streamed": {"tools": STRICT, "stream": True},
    "strict and all settings": {"tools": STRICT, **ALL, "bad_words": ["Rome"]},
    "one at most": {"tools": FREE, **ONE},
    "strict, one at most": {"tools": STRICT, **ONE},
    "required": {"tools": FREE, "tool_choice": "required"},
    "required, one": {"tools": STRICT, "tool_choice": "required", **ONE},
    "named": {"tools": STRICT, "tool_choice": NAMED},
}
EACH = {name: ("chat/completions", said) for name, said in CHAT.items()}
EACH["messages"] = (
    "messages",
    {
        "tools": [{"name": "weather", "input_schema": SCHEMA, "strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        # There is no seed there: none of three may be cut off.
        "max_tokens": 128,
    },
)
SEEDS = range(2)
# The same in the words of responses, which have no log-probabilities where a tool is called.
FLAT = [{"type": "function", **one} for one in (WEATHER, GIVE_UP)]
FLAT_STRICT = [FLAT[0] | {"strict": True}, FLAT[1]]
RESPONSES: dict[str, dict[str, Any]] = {
    "strict": {"tools": FLAT_STRICT},
    "one at most": {"tools": FLAT, **ONE},
    "required": {"tools": FLAT, "tool_choice": "required"},
    "named": {"tools": FLAT_STRICT, "tool_choice": {"type": "function", "name": "weather"}},
}
# What else shapes a reply there.
CARD = {"top_p": 0.95, "top_k": 20, "presence_penalty": 0.3}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hermes(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A model server that reads Hermes' syntax, as `pawl up` starts it, behind a proxy."""
    folder = tmp_path_factory.mktemp("hermes")
    plan = small_plan(folder, model_dir, POLICY, "default", tool_parser="hermes")
    async with serving_stack(plan) as running:
        yield running


@pytest.fixture(scope="module")
def learner(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    """Load the model once, for what the server's log-probabilities are compared with."""
    shared = recipe(micro_batch_tokens=2048)
    return Learner(model_dir, shared, seed=0, scratch=tmp_path_factory.mktemp("learner"))


async def ask(stack: Stack, name: str, seed: int) -> None:
    path, said = EACH[name]
    body = {"model": POLICY, "messages": MESSAGES, "max_tokens": 48, "temperature": 1.0, **said}
    if path != "messages":
        body["seed"] = seed
    await post(stack.base_url, path, body, f"{name}-{seed}")


async def test_calls_in_hermes_syntax_are_replayed_to_a_thousandth_of_a_nat(
    hermes: Stack, learner: Learner, show_nats: ShowNats
) -> None:
    # At once: the server makes the masks of a whole batch.
    await asyncio.gather(*(ask(hermes, name, seed) for name in EACH for seed in SEEDS))
    wanted = {f"{name}-{seed}": name for name in EACH for seed in SEEDS}
    calls, folders = await recorded_calls(hermes, wanted)
    recorded = [call for own in calls.values() for call in own]
    assert {call.reason for call in recorded} == {None}
    assert {call.sampling["grammar"]["kind"] for call in recorded} == {"tools"}
    # Where none need be called, the examples let the model call all the same.
    for name in ("strict", "one at most", "required", "named", "messages"):
        assert any(call.tool_calls for call in calls[name]), name
    means = trainers_differences(learner, calls, folders)
    show_nats(means)
    assert max(means.values()) <= 1e-3, means

    for call in recorded:
        row = row_of(call)
        assert learner.why_unreplayable(row.distribution, row.sampled_ids) is None
    forced = row_of(calls["named"][0]).distribution
    free = learner._tokenizer.encode("It rains in Paris.")
    assert learner.why_unreplayable(forced, free) == OUTSIDE_GRAMMAR


async def ask_both_ways(stack: Stack, name: str, seed: int) -> None:
    """As a chat, and as a response, whole and streamed."""
    body = {"model": POLICY, "temperature": 0.8, "seed": seed, **CARD}
    chat = body | {"messages": MESSAGES, "max_tokens": 48} | CHAT[name]
    response = body | {"input": MESSAGES, "max_output_tokens": 48} | RESPONSES[name]
    await post(stack.base_url, "chat/completions", chat, f"{name}-{seed}, as a chat")
    await post(stack.base_url, "responses", response, f"{name}-{seed}, whole")
    await post(stack.base_url, "responses", response | {"stream": True}, f"{name}-{seed}, streamed")


async def test_responses_in_hermes_syntax_are_recomputed_to_a_thousandth_of_a_nat(
    hermes: Stack, learner: Learner, show_nats: ShowNats
) -> None:
    """Held to the same tag, a chat has the server's own log-probabilities."""
    await asyncio.gather(*(ask_both_ways(hermes, name, s) for name in RESPONSES for s in SEEDS))
    ways = ("as a chat", "whole", "streamed")
    wanted = {
        f"{name}-{seed}, {way}": f"{name}-{seed}, {way}"
        for name in RESPONSES
        for seed in SEEDS
        for way in ways
    }
    calls, folders = await recorded_calls(hermes, wanted)
    found = {name: call for name, [call] in calls.items()}
    assert {call.reason for call in found.values()} == {None}
    assert {call.sampling["grammar"]["kind"] for call in found.values()} == {"tools"}
    pairs: dict[str, list[tuple[TransitionRow, TransitionRow]]] = {}
    for name in RESPONSES:
        for way in ways[1:]:
            own = [
                (found[f"{name}-{seed}, {way}"], found[f"{name}-{seed}, as a chat"])
                for seed in SEEDS
            ]
            for call, twin in own:
                assert_alike(call, twin)
            silent = [(call, twin) for call, twin in own if not call.tokens.sampled_logprobs]
            assert any(call.tool_calls for call, _ in silent), (name, way)
            pairs[f"{name}, {way}"] = silent
    differences = recomputed_differences(learner, pairs, folders)
    show_nats(differences)
    assert max(differences.values()) <= 1e-3, differences
