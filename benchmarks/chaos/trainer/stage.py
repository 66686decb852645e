"""What a run is about: a tiny model, and a ledger of scored episodes that it sampled."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.chaos.trainer.recipe import GROUPS, MEMBERS, POLICY
from store.connection.engine import make_engine
from store.ids import new_id
from store.records import CallRecord, FeedbackItem, FeedbackRecord, SpoolRecord, Tokens
from store.schema.migrate import upgrade
from store.updates.policies import ensure_base
from store.values.tokens import pack_ids, pack_logprobs
from store.write.ingest import ingest

CALLS: Final = 2
WORDS: Final = 97
PROMPT: Final = 9
REPLY: Final = 5
TOLD: Final = 3
# One episode in so many comes without log-probabilities.
SILENT: Final = 5
START: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Said(NamedTuple):
    """One sampled reply."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


def write_model(folder: Path) -> None:
    """Two layers of random weights with grouped-query attention, and 97 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)


async def fill(database_url: str, model: Path, updates: int, seed: int) -> None:
    """Migrate, and store the scored episodes of so many updates."""
    records = _episodes(str(model), updates, seed)
    await upgrade(database_url)
    engine = make_engine(database_url)
    async with engine.begin() as connection:
        await ensure_base(connection, POLICY)
        await ingest(connection, records)
    await engine.dispose()


def _episodes(model: str, updates: int, seed: int) -> list[SpoolRecord]:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    dice = torch.Generator().manual_seed(seed)
    tasks = updates * GROUPS
    opening = torch.randint(2, WORDS, (tasks, PROMPT), generator=dice)
    contexts = opening.repeat_interleave(MEMBERS, 0)
    turns: list[list[Said]] = [[] for _ in range(tasks * MEMBERS)]
    for _ in range(CALLS):
        contexts = _sample(base, contexts, dice, turns)
        told = torch.randint(2, WORDS, (len(contexts), TOLD), generator=dice)
        contexts = torch.cat([contexts, told], 1)
    return [
        record
        for number, said in enumerate(turns)
        for record in _episode(f"e{number}", f"t{number // MEMBERS}", number, said)
    ]


def _sample(
    base: Any, contexts: torch.Tensor, dice: torch.Generator, turns: list[list[Said]]
) -> torch.Tensor:
    """A reply to each context; the contexts with it."""
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


def _episode(key: str, task: str, number: int, turns: Sequence[Said]) -> list[SpoolRecord]:
    """Its calls, and a reward: the share of even words that were said."""
    words = [word for said in turns for word in said.sampled_ids]
    item = FeedbackItem(
        id=new_id(),
        metric="reward",
        value=sum(word % 2 == 0 for word in words) / len(words),
        target_kind="episode",
        target=key,
    )
    at = START + timedelta(seconds=number)
    # What some of them were sampled with nobody told: the trainer computes it.
    told = [said if number % SILENT else said._replace(logprobs=[]) for said in turns]
    return [
        *(_call(key, task, said) for said in told),
        FeedbackRecord(id=new_id(), at=at, items=(item,)),
    ]


def _call(key: str, task: str, said: Said) -> CallRecord:
    return CallRecord(
        id=new_id(),
        episode=key,
        method="header",
        agent="default",
        task=task,
        dialect="chat",
        policy=POLICY,
        policy_version=0,
        served_model=POLICY,
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
        sampling=b'{"temperature": 1.0}',
        trainable=True,
        reason=None,
        tool_calls=(),
        tool_events=(),
        usage=None,
        finish="stop",
        started_at=START,
        first_chunk_ms=1.0,
        total_ms=2.0,
        retry=0,
    )
