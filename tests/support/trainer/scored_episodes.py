"""Make what trainers are killed over: who calls in an episode, a recipe, and scored episodes.

A tiny model of random weights samples them, so that their log-probabilities are real ones.
"""

import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from store.database import make_engine
from store.records import CallRecord, SpoolRecord, Tokens
from store.schema.migrate import upgrade
from store.values.packing import pack_ids, pack_logprobs
from store.version_states import ensure_base
from tests.support.ledger.episodes import ingest
from tests.support.records import START, call, reward

# The base model, as the model server lists it.
BASE: Final = "tiny"
FIXED: Final = "rest"
GROUPS, MEMBERS, STEPS = 2, 4, 2
# Calls of each agent in an episode, and the lengths of what they read and say, in words.
CALLS, WORDS, PROMPT, REPLY, TOLD = 2, 97, 9, 5, 3
# One episode in so many comes without log-probabilities: the trainer computes them.
SILENT: Final = 5
BATCH: Final = 50


class Agent(NamedTuple):
    """Name an agent; `policy` is None if an outside model answers it."""

    name: str
    policy: str | None
    trained: bool = True


ALONE: Final = Agent("default", BASE)
WRITER, CHECKER = Agent("writer", "writer"), Agent("checker", "checker")
REWRITER, PLANNER = Agent("rewriter", FIXED, False), Agent("planner", None, False)
# By the number of policies in training: the agents of an episode in the order in which they
# call. Episodes take these orders in turn.
CASTS: Final[Mapping[int, Sequence[Sequence[Agent]]]] = {
    1: ((ALONE,),),
    2: (
        (WRITER, CHECKER, REWRITER),
        (PLANNER, WRITER, CHECKER, REWRITER),
        (CHECKER, WRITER, REWRITER),
    ),
}
POLICIES_TOML: Final = f"""
[[policy]]
name = "{WRITER.policy}"
base = "{BASE}"
agents = ["{WRITER.name}"]
[[policy]]
name = "{CHECKER.policy}"
base = "{BASE}"
agents = ["{CHECKER.name}"]
[[policy]]
name = "{FIXED}"
base = "{BASE}"
models = ["{BASE}"]
trained = false
"""


def agents(policies: int) -> list[Agent]:
    """Return each of the agents in a ledger with so many policies in training, once."""
    return list(dict.fromkeys(agent for cast in CASTS[policies] for agent in cast))


def trained(policies: int) -> list[str]:
    """Return the names of so many policies in training."""
    return [agent.policy for agent in agents(policies) if agent.policy and agent.trained]


def recipe_toml() -> str:
    """Return a recipe of two optimiser steps an update.

    Every version stays loaded: nothing that a kill left may be unloaded unseen.
    """
    return f"""
learner = "grpo"
[claim]
group_size = {MEMBERS}
groups = {GROUPS}
max_age_s = 1e9
max_staleness = 1000000
[optimizer]
learning_rate = 2e-3
[batch]
steps = {STEPS}
micro_batch_tokens = 64
[off_policy]
sequence_min = 0.0
sequence_max = 1e9
max_drift = 1e9
min_effective_sample = 0.0
[lora]
rank = 4
alpha = 8
[publish]
tolerance = 1e-3
"""


def write_model(folder: Path, seed: int = 0, spread: float = 0.02) -> None:
    """Write a model of two layers: random weights, grouped-query attention, 97 words.

    The larger the weights' `spread`, the more a distribution says.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=spread,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)


async def fill(
    database_urls: Sequence[str], model: Path, updates: int, seed: int, policies: int
) -> None:
    """Migrate, and store the same scored episodes in each, which arrive in another order."""
    records = scored_episodes(str(model), updates, seed, policies)
    dice = random.Random(seed)
    for number, url in enumerate(database_urls):
        if number:
            dice.shuffle(records)
        await upgrade(url)
        engine = make_engine(url)
        for start in range(0, len(records), BATCH):
            async with engine.begin() as connection:
                await ingest(connection, records[start : start + BATCH])
        async with engine.begin() as connection:
            for policy in trained(policies):
                await ensure_base(connection, policy, BASE)
        await engine.dispose()


class Said(NamedTuple):
    """Hold one sampled reply."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


# What an outside model says: nobody knows its ids.
UNKNOWN: Final = Said([], [], [])


def scored_episodes(model: str, updates: int, seed: int, policies: int) -> list[SpoolRecord]:
    """Make enough for so many updates of each of so many policies."""
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    dice = torch.Generator().manual_seed(seed)
    tasks = updates * GROUPS
    turns = {
        agent: _conversations(base, tasks, dice)
        for agent in agents(policies)
        if agent.policy is not None
    }
    casts = CASTS[policies]
    return [
        record
        for number in range(tasks * MEMBERS)
        for record in _episode(
            number,
            casts[number % len(casts)],
            {agent: said[number] for agent, said in turns.items()},
        )
    ]


def _conversations(base: Any, tasks: int, dice: Any) -> list[list[Said]]:
    """Return one agent's replies, by episode; a group's members are asked the same at first."""
    import torch

    opening = torch.randint(2, WORDS, (tasks, PROMPT), generator=dice)
    contexts = opening.repeat_interleave(MEMBERS, 0)
    turns: list[list[Said]] = [[] for _ in range(tasks * MEMBERS)]
    for _ in range(CALLS):
        length, logprobs = contexts.shape[1], []
        with torch.no_grad():
            for _ in range(REPLY):
                distribution = torch.log_softmax(base(contexts).logits[:, -1], -1)
                chosen = torch.multinomial(distribution.exp(), 1, generator=dice)
                logprobs.append(distribution.gather(1, chosen))
                contexts = torch.cat([contexts, chosen], 1)
        for turn, ids, values in zip(turns, contexts, torch.cat(logprobs, 1), strict=True):
            turn.append(Said(ids[:length].tolist(), ids[length:].tolist(), values.tolist()))
        told = torch.randint(2, WORDS, (len(contexts), TOLD), generator=dice)
        contexts = torch.cat([contexts, told], 1)
    return turns


def _episode(
    number: int, cast: Sequence[Agent], turns: Mapping[Agent, Sequence[Said]]
) -> list[SpoolRecord]:
    """Make an episode: its calls, and as reward the share of even words of policies in training.

    No two have the same, so that each group has a spread and counts for an update.
    """
    key, task = f"e{number}", f"t{number // MEMBERS}"
    replies = [said for agent in cast if agent.trained for said in turns[agent]]
    words = [word for said in replies for word in said.sampled_ids]
    score = sum(word % 2 == 0 for word in words) / len(words) + number / 1e6
    calls: list[SpoolRecord] = []
    for turn in range(CALLS):
        for agent in cast:
            said = turns[agent][turn] if agent in turns else UNKNOWN
            told = said if number % SILENT else said._replace(logprobs=[])
            calls.append(call_record(key, task, agent, told, START))
    return [*calls, reward(score, episode=key, at=number)]


def call_record(
    key: str,
    task: str,
    agent: Agent,
    said: Said,
    at: datetime,
    version: int = 0,
    temperature: float = 1.0,
) -> CallRecord:
    """Return a call of an episode, as a proxy records it; `version` is its policy's, if trained."""
    is_trained = agent.trained
    return call(
        key,
        agent=agent.name,
        task=task,
        policy=agent.policy,
        policy_version=version if is_trained else None,
        served_model="hosted" if agent.policy is None else BASE,
        tokens=Tokens(
            prompt_ids=pack_ids(said.prompt_ids),
            sampled_ids=pack_ids(said.sampled_ids),
            sampled_logprobs=pack_logprobs(said.logprobs),
        ),
        sampling=json.dumps({"temperature": temperature}).encode(),
        trainable=is_trained,
        reason=None if is_trained else "fixed_policy" if agent.policy else "unknown_policy",
        started_at=at,
    )
