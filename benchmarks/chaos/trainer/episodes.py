"""Make a ledger's scored episodes: what their agents were told and sampled, as records."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import torch

from benchmarks.chaos.trainer.cast import BASE, CASTS, Agent, agents
from benchmarks.chaos.trainer.recipe import GROUPS, MEMBERS
from store.ids import new_id
from store.records import CallRecord, FeedbackItem, FeedbackRecord, SpoolRecord, Tokens
from store.values.tokens import pack_ids, pack_logprobs

# Of each agent in an episode.
CALLS: Final = 2
WORDS: Final = 97
PROMPT: Final = 9
REPLY: Final = 5
TOLD: Final = 3
# One episode in so many comes without log-probabilities.
SILENT: Final = 5
START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Said(NamedTuple):
    """Hold one sampled reply."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


# What an outside model says: nobody knows its ids.
UNKNOWN: Final = Said([], [], [])


def scored_episodes(model: str, updates: int, seed: int, policies: int) -> list[SpoolRecord]:
    """Make enough for so many updates of each of so many policies."""
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


def _conversations(base: Any, tasks: int, dice: torch.Generator) -> list[list[Said]]:
    """Return one agent's replies, by episode; a group's members are asked the same at first."""
    opening = torch.randint(2, WORDS, (tasks, PROMPT), generator=dice)
    contexts = opening.repeat_interleave(MEMBERS, 0)
    turns: list[list[Said]] = [[] for _ in range(tasks * MEMBERS)]
    for _ in range(CALLS):
        contexts = _sample(base, contexts, dice, turns)
        told = torch.randint(2, WORDS, (len(contexts), TOLD), generator=dice)
        contexts = torch.cat([contexts, told], 1)
    return turns


def _sample(
    base: Any, contexts: torch.Tensor, dice: torch.Generator, turns: list[list[Said]]
) -> torch.Tensor:
    """Sample a reply to each context, and return the contexts with it."""
    length = contexts.shape[1]
    logprobs = []
    with torch.no_grad():
        for _ in range(REPLY):
            distribution = torch.log_softmax(base(contexts).logits[:, -1], -1)
            chosen = torch.multinomial(distribution.exp(), 1, generator=dice)
            logprobs.append(distribution.gather(1, chosen))
            contexts = torch.cat([contexts, chosen], 1)
    for turn, ids, values in zip(turns, contexts, torch.cat(logprobs, 1), strict=True):
        turn.append(Said(ids[:length].tolist(), ids[length:].tolist(), values.tolist()))
    return contexts


def _episode(
    number: int, cast: Sequence[Agent], turns: Mapping[Agent, Sequence[Said]]
) -> list[SpoolRecord]:
    """Make an episode: its calls, and as reward the share of even words of policies in training.

    No two have the same, so that each group has a spread and counts for an update.
    """
    key, task = f"e{number}", f"t{number // MEMBERS}"
    heard = [turns[agent] for agent in cast if agent.trained]
    words = [word for said in heard for one in said for word in one.sampled_ids]
    item = FeedbackItem(
        id=new_id(),
        metric="reward",
        value=sum(word % 2 == 0 for word in words) / len(words) + number / 1e6,
        target_kind="episode",
        target=key,
    )
    at = START + timedelta(seconds=number)
    calls = [
        call_record(key, task, agent, _told(turns[agent][turn], number), START)
        if agent in turns
        else call_record(key, task, agent, UNKNOWN, START)
        for turn in range(CALLS)
        for agent in cast
    ]
    return [*calls, FeedbackRecord(id=new_id(), at=at, items=(item,))]


def _told(said: Said, number: int) -> Said:
    """Return what is recorded; what nobody told of some samples, the trainer computes."""
    return said if number % SILENT else said._replace(logprobs=[])


def call_record(
    key: str,
    task: str,
    agent: Agent,
    said: Said,
    at: datetime,
    version: int = 0,
    temperature: float = 1.0,
) -> CallRecord:
    """Return a call of an episode, in the words that a proxy records it in.

    `version` is that of the agent's policy, if it is trained.
    """
    reason = "unknown_policy" if agent.policy is None else "fixed_policy"
    return CallRecord(
        id=new_id(),
        episode=key,
        method="header",
        agent=agent.name,
        task=task,
        dialect="chat",
        policy=agent.policy,
        policy_version=version if agent.trained else None,
        served_model="hosted" if agent.policy is None else BASE,
        status="complete",
        http_status=200,
        stream=False,
        request=b"{}",
        request_raw=None,
        reply=b"{}",
        reply_raw=None,
        response_id=None,
        tokens=Tokens(
            prompt_ids=pack_ids(said.prompt_ids),
            sampled_ids=pack_ids(said.sampled_ids),
            sampled_logprobs=pack_logprobs(said.logprobs),
        ),
        sampling=json.dumps({"temperature": temperature}).encode(),
        trainable=agent.trained,
        reason=None if agent.trained else reason,
        tool_calls=(),
        tool_events=(),
        usage=None,
        finish="stop",
        started_at=at,
        first_chunk_ms=1.0,
        total_ms=2.0,
        retry=0,
    )
