"""What a real vLLM sampled under every setting has the probabilities that the trainer computes."""

import asyncio
from typing import Any

import pytest

from pawl.stack.stack import Stack
from tests.e2e.conftest import POLICY, ShowNats
from tests.e2e.replaying import ALL, post, recorded_calls, trainers_differences
from trainer.learners.learner import Learner

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

EACH: dict[str, dict[str, Any]] = {
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
QUESTION = "Tell me about the capital of France, the river there and the food."


async def ask(stack: Stack, name: str, seed: int) -> None:
    body = {"model": POLICY, "max_tokens": 32, "seed": seed, "temperature": 1.0}
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    await post(stack, "chat/completions", body | asked | EACH[name], f"{name}-{seed}")


async def test_each_setting_is_replayed_to_a_thousandth_of_a_nat(
    stack: Stack, learner: Learner, show_nats: ShowNats
) -> None:
    seeds = range(3)
    # At once: the server samples a batch of which each row has settings of its own.
    await asyncio.gather(*(ask(stack, name, seed) for name in EACH for seed in seeds))
    wanted = {f"{name}-{seed}": name for name in EACH for seed in seeds}
    calls, folders = await recorded_calls(stack, wanted)
    assert {call.reason for own in calls.values() for call in own} == {None}
    means = trainers_differences(learner, calls, folders)
    show_nats(means)
    assert max(means.values()) <= 1e-3, means
