"""What a real vLLM sampled under grammars has the probabilities that the trainer computes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pawl.stack.stack import Stack
from tests.e2e.conftest import POLICY
from tests.e2e.test_replayed_sampling import ALL, post, recorded_calls, row_of, trainers_differences
from tests.support.training import recipe
from trainer.learners.learner import Learner
from trainer.learners.replay.grammars import OUTSIDE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
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


async def ask(stack: Stack, name: str, seed: int) -> None:
    path, said = EACH[name]
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    body = {"model": POLICY, limit: 32, "temperature": 1.0, **said}
    if path != "messages":
        body["seed"] = seed
    await post(stack, path, body, f"{name}-{seed}")


async def test_each_grammar_is_replayed_to_a_thousandth_of_a_nat(
    stack: Stack, model_dir: str, tmp_path: Path
) -> None:
    seeds = range(2)
    # At once: the server makes the masks of a whole batch.
    await asyncio.gather(*(ask(stack, name, seed) for name in EACH for seed in seeds))
    wanted = {f"{name}-{seed}": name for name in EACH for seed in seeds}
    calls, folders = await recorded_calls(stack, wanted)
    assert {call.reason for own in calls.values() for call in own} == {None}
    means = trainers_differences(model_dir, tmp_path, calls, folders)
    (tmp_path / "nats_a_token.json").write_text(json.dumps(means))
    assert max(means.values()) <= 1e-3, means

    learner = Learner(model_dir, recipe(), seed=0, scratch=tmp_path)
    held, other = (row_of(calls[name][0]) for name in ("json_schema", "regex"))
    assert learner.why_unreplayable(held.distribution, held.sampled_ids) is None
    assert learner.why_unreplayable(held.distribution, other.sampled_ids) == OUTSIDE
