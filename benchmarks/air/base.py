"""Make the base model: a tiny Llama that has read clumsy work with the tools.

It has to know a little, as a real base model does: from random weights not one episode in
a million would end well. It learns from a worker that does the right next thing with the
probability `skill`, and something careless otherwise.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.air.task import (
    CALL_WORDS,
    CHAIN,
    END,
    NOTE,
    TAKES,
    WORDS,
    State,
    Task,
    begin,
    new_task,
    take,
)
from benchmarks.air.worlds import World

ID: Final = {word: number for number, word in enumerate(WORDS)}
IGNORED: Final = -100
BATCH: Final = 64
RATE: Final = 3e-3
# How often the teacher takes the key that is wanted.
PREFERENCE: Final = 0.75


def demonstrate(world: World, task: Task, draw: random.Random) -> tuple[list[str], list[bool]]:
    """Return one episode of the careless worker: its words, and which of them it said itself."""
    words, own = list(task.prompt), [False] * len(task.prompt)
    state = begin(task)
    while not state.ended:
        said = careless_call(world, task, state, draw)
        outcome = take(task, state, said)
        words += [*said, *outcome.reply]
        own += [True] * len(said) + [False] * len(outcome.reply)
        state = outcome.state
    return words, own


def careless_call(world: World, task: Task, state: State, draw: random.Random) -> list[str]:
    """Return what the worker says next."""
    if draw.random() < world.notes:
        return [NOTE, draw.choice(TAKES[NOTE]), END]
    tool, word, end = right_call(task, state, draw)
    if draw.random() < world.skill:
        return [tool, word, end]
    other = draw.choice(TAKES[NOTE])
    return draw.choice(
        [
            [tool, end],
            [tool, word, other, end],
            [tool, word, word, other],
            [tool, other, end],
            [other, word, end],
        ]
    )


def right_call(task: Task, state: State, draw: random.Random) -> list[str]:
    """Return the chain's next call, with either key."""
    key = draw.random() >= PREFERENCE
    for other in (int(key), int(not key)):
        for place in (2, 1):
            word = task.answers[other][place - 1]
            if word in state.given:
                return [CHAIN[place], word, END]
    return [CHAIN[0], task.keys[int(key)], END]


def write_base(folder: Path, world: World, steps: int, seed: int = 0) -> str:
    """Train a base model on the worker's episodes; the folder, as a model's name."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = LlamaForCausalLM(_shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, RATE / 20)
    for step in range(steps):
        # Perfect work first: from careless work alone it takes very long to learn copying.
        skill = 1 - (1 - world.skill) * min(1.0, 2 * step / steps)
        ids, labels = _batch(replace(world, skill=skill), draw)
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def _shape() -> Any:
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=ID["begin"],
        eos_token_id=ID[END],
    )


def _tokenizer() -> Any:
    words = Tokenizer(WordLevel(ID, unk_token=WORDS[0]))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=WORDS[0])


def _batch(world: World, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels (B, T); only the worker's own words are to be learned."""
    length = len(["begin", "k", "k", "call"]) + world.turns * (CALL_WORDS + 4)
    ids = torch.zeros(BATCH, length, dtype=torch.long)
    labels = torch.full((BATCH, length), IGNORED)
    for row in range(BATCH):
        words, own = demonstrate(world, new_task("", world.tools, world.turns, draw), draw)
        for place, (word, said) in enumerate(zip(words, own, strict=True)):
            ids[row, place] = ID[word]
            if said:
                labels[row, place] = ID[word]
    return ids, labels
