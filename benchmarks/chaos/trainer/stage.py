"""Make what a run is about: a tiny model, and a ledger of scored episodes that it sampled."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from benchmarks.chaos.trainer.cast import BASE, trained
from benchmarks.chaos.trainer.episodes import WORDS, scored_episodes
from store.connection.engine import make_engine
from store.records import SpoolRecord
from store.schema.migrate import upgrade
from store.version_states import ensure_base
from store.write.ingest import ingest

BATCH: Final = 50


def write_model(folder: Path, seed: int = 0, spread: float = 0.02) -> None:
    """Write a model of two layers: random weights, grouped-query attention, 97 words.

    The larger the weights' `spread`, the more a distribution says.
    """
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
        # vLLM's CPU build has no attention of smaller heads.
        head_dim=32,
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
        await _store(url, records, trained(policies))


async def _store(database_url: str, records: Sequence[SpoolRecord], policies: list[str]) -> None:
    await upgrade(database_url)
    engine = make_engine(database_url)
    for start in range(0, len(records), BATCH):
        async with engine.begin() as connection:
            await ingest(connection, records[start : start + BATCH])
    async with engine.begin() as connection:
        for policy in policies:
            await ensure_base(connection, policy, BASE)
    await engine.dispose()
