"""Train the base model, a tiny Llama, on a careless worker's episodes, then train and sample it.

The base model has to know a little, as a real one does: with random weights not one episode in a
million would succeed. The worker makes the right next call with the probability `skill`, else a
careless one.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Words
from transformers.utils import logging

from benchmarks.air.task import (
    CALL_WORDS,
    CHAIN,
    END,
    NOTE,
    TAKES,
    WORDS,
    Outcome,
    State,
    Task,
    World,
    apply_tool_call,
    begin_state,
    new_task,
)
from store.ids import new_id
from store.records import Group, Tokens, ToolCall, ToolEvent, TransitionRow
from store.values.packing import pack_ids, pack_logprobs
from tests.support.stored import episode, transition
from trainer.batches import Row, training_rows
from trainer.credit.assign import assign_credit
from trainer.learners.learner import Learner
from trainer.recipes.recipe import CreditOptions, Recipe

POLICY: Final = "toy"
ID: Final = {word: number for number, word in enumerate(WORDS)}
IGNORED: Final = -100
BATCH, RATE = 64, 3e-3
# How often the worker prefers the rewarded key.
PREFERENCE: Final = 0.75
GROUP_SIZE: Final = 8
# The policy is evaluated before every second wave, on this many tasks that are never trained on.
LOOK_EVERY, HELD_OUT, HELD_OUT_SEED = 2, 256, -1


class Arm(NamedTuple):
    """A way to compute rewards, and its colour in the picture.

    `unbounded` adds `air_lambda` times the plain sum of all tool scores, which no recipe of Pawl
    does: many easy calls would be rewarded.
    """

    name: str
    air_lambda: float
    colour: str
    unbounded: bool = False


class Look(NamedTuple):
    """Means over the held-out tasks, once training has had `episodes` episodes."""

    episodes: int
    r_final: float
    calls: float
    notes: float


def write_base(folder: Path, world: World, steps: int) -> str:
    """Train a base model on the worker's episodes; return the folder as the model's name."""
    torch.manual_seed(0)
    draw = random.Random(0)
    config = LlamaConfig(
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
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, RATE / 20)
    for step in range(steps):
        # Perfect work first: from careless work alone it takes very long to learn copying.
        skill = 1 - (1 - world.skill) * min(1.0, 2 * step / steps)
        ids, labels = _batch(world, skill, draw)
        logits = model(ids).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel(ID, unk_token=WORDS[0]))
    tokenizer = Words(tokenizer_object=words, eos_token=END, pad_token=WORDS[0])
    tokenizer.save_pretrained(folder)
    return str(folder)


def _batch(world: World, skill: float, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Return ids and labels (B, T); only the worker's own words have labels."""
    length = 4 + world.turns * (CALL_WORDS + 4)
    ids, labels = torch.zeros(BATCH, length, dtype=torch.long), torch.full((BATCH, length), IGNORED)
    for row in range(BATCH):
        task = new_task("", world, draw)
        state, words = begin_state(task), list(task.prompt)
        while not state.ended:
            call = _careless_call(task, state, skill, draw)
            start = len(words)
            labels[row, start : start + len(call)] = torch.tensor([ID[word] for word in call])
            outcome = apply_tool_call(task, state, call)
            words += [*call, *outcome.reply]
            state = outcome.state
        ids[row, : len(words)] = torch.tensor([ID[word] for word in words])
    return ids, labels


def _careless_call(task: Task, state: State, skill: float, draw: random.Random) -> list[str]:
    if draw.random() < task.world.notes:
        return [NOTE, draw.choice(TAKES[NOTE]), END]
    tool, word = _right_call(task, state, draw)
    if draw.random() < skill:
        return [tool, word, END]
    other = draw.choice(TAKES[NOTE])
    careless = [tool, END], [tool, word, other, END], [tool, word, word, other]
    return draw.choice([*careless, [tool, other, END], [other, word, END]])


def _right_call(task: Task, state: State, draw: random.Random) -> tuple[str, str]:
    """Return the chain's next call, for the rewarded key or the other one."""
    key = draw.random() >= PREFERENCE
    for other in (int(key), int(not key)):
        for place in (2, 1):
            word = task.answers[other][place - 1]
            if word in state.given:
                return CHAIN[place], word
    return CHAIN[0], task.keys[int(key)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: its tokens and its outcome."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    outcome: Outcome


@dataclass(slots=True)
class PlayedEpisode:
    """An episode that is played or was played: its tokens, state and turns."""

    task: Task
    ids: list[int]
    state: State
    turns: list[Turn]


class Sampler:
    """Plays all episodes of a wave in step, with a saved version, or at first the base model."""

    def __init__(self, base: str, seed: int) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(base).eval()
        self._model: Any = self._base
        self._random = torch.Generator().manual_seed(seed)

    def load(self, adapter: Path) -> None:
        """Load the version to sample with from now on."""
        if self._model is self._base:
            self._model = get_peft_model(self._base, LoraConfig.from_pretrained(str(adapter)))
            self._model.eval()
        set_peft_model_state_dict(self._model, load_file(adapter / "adapter_model.safetensors"))

    @torch.inference_mode()
    def play(self, tasks: Sequence[Task]) -> list[PlayedEpisode]:
        """Play one episode of each task (a task may be repeated), at temperature 1."""
        episodes = [
            PlayedEpisode(task, [ID[w] for w in task.prompt], begin_state(task), [])
            for task in tasks
        ]
        self._cache, self._mask = DynamicCache(), torch.zeros(len(tasks), 0, dtype=torch.long)
        logits = self._next_logits([episode.ids for episode in episodes])
        while not all(episode.state.ended for episode in episodes):
            sampled_calls = self._sample_calls(
                logits, [episode.state.ended for episode in episodes]
            )
            logits = self._next_logits(
                [_apply_tool_call(*pair) for pair in zip(episodes, sampled_calls, strict=True)]
            )
        return episodes

    def _sample_calls(self, logits: Tensor, is_ended: list[bool]) -> list[list[tuple[int, float]]]:
        """Sample each row's next call, token by token, with the log-probabilities of its tokens."""
        sampled_calls: list[list[tuple[int, float]]] = [[] for _ in is_ended]
        ended = list(is_ended)
        for _ in range(CALL_WORDS):
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=self._random)
            chosen = logprobs.gather(1, drawn)[:, 0].tolist()
            fed: list[list[int]] = [[] for _ in is_ended]
            for row, (token, logprob) in enumerate(zip(drawn[:, 0].tolist(), chosen, strict=True)):
                if not ended[row]:
                    sampled_calls[row].append((token, logprob))
                    fed[row], ended[row] = [token], token == ID[END]
            logits = self._next_logits(fed)
            if all(ended):
                break
        return sampled_calls

    def _next_logits(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """Return logits (B, V) after each row's piece; meaningless for a row with an empty piece.

        Shorter pieces are padded, and the pads masked.
        """
        width = max(1, *(len(piece) for piece in pieces))
        padded = [[0] * (width - len(piece)) + list(piece) for piece in pieces]
        mask = [[0] * (width - len(piece)) + [1] * len(piece) for piece in pieces]
        self._mask = torch.cat([self._mask, torch.tensor(mask)], dim=1)
        logits: Tensor = self._model(
            input_ids=torch.tensor(padded),
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0)[:, -width:],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        return logits


def _apply_tool_call(episode: PlayedEpisode, tokens: list[tuple[int, float]]) -> list[int]:
    """Apply a row's call to its task; return the ids of the reply, which the policy reads next."""
    if episode.state.ended:
        return []
    sampled, logprobs = zip(*tokens, strict=True)
    outcome = apply_tool_call(episode.task, episode.state, [WORDS[token] for token in sampled])
    episode.turns.append(Turn(tuple(episode.ids), sampled, logprobs, outcome))
    episode.state = outcome.state
    reply = [] if outcome.state.ended else [ID[word] for word in outcome.reply]
    episode.ids += [*sampled, *reply]
    return reply


def as_groups(played: Sequence[PlayedEpisode], rewards: Sequence[float]) -> list[Group]:
    """Group neighbouring episodes of the same task, as the trainer would claim them."""
    episodes = [
        replace(episode(reward, task=one.task.name), calls=tuple(map(_call, one.turns)))
        for one, reward in zip(played, rewards, strict=True)
    ]
    return [
        Group(task=task or "", episodes=tuple(members))
        for task, members in groupby(episodes, key=lambda episode: episode.task)
    ]


def _call(turn: Turn) -> TransitionRow:
    tool, tool_id = turn.outcome, f"call_{turn.outcome.state.turn}"
    return transition(
        policy=POLICY,
        tokens=Tokens(
            prompt_ids=pack_ids(turn.prompt_ids),
            sampled_ids=pack_ids(turn.sampled_ids),
            sampled_logprobs=pack_logprobs(turn.sampled_logprobs),
        ),
        tool_calls=(ToolCall(id=tool_id, name=tool.tool, arguments=tool.arguments),),
        tool_events=(ToolEvent(id=new_id(), tool_id=tool_id, name=tool.tool, status=tool.status),),
    )


def run_arm(world: World, base: str, arm: Arm, seed: int) -> list[Look]:
    """Train from the base model for the world's number of waves; return the looks in between."""
    recipe, draw = recipe_of(world, arm), random.Random(seed)
    held_out = new_tasks(world, HELD_OUT, random.Random(HELD_OUT_SEED))
    sampler, looks = Sampler(base, seed), []
    with tempfile.TemporaryDirectory(prefix="pawl-air-") as scratch:
        learner, version = Learner(base, recipe, seed, Path(scratch)), Path(scratch) / "version"
        version.mkdir()
        for wave in range(world.waves + 1):
            if wave % LOOK_EVERY == 0 or wave == world.waves:
                looks.append(_summarise(wave * world.groups * GROUP_SIZE, sampler.play(held_out)))
            if wave == world.waves:
                break
            tasks = new_tasks(world, world.groups, draw)
            played = sampler.play([task for task in tasks for _ in range(GROUP_SIZE)])
            rows = credited_rows(played, arm, recipe.credit)
            # Without a group with spread nothing is trained.
            if rows:
                learner.update(rows)
                learner.save(version)
                sampler.load(version)
    return looks


def recipe_of(world: World, arm: Arm) -> Recipe:
    """Return a recipe with default credit and sizes for a tiny model."""
    return Recipe.model_validate(
        {
            "dtype": "float32",
            "claim": {"group_size": GROUP_SIZE, "groups": world.groups},
            "credit": {"air_lambda": 0.0 if arm.unbounded else arm.air_lambda},
            "optimizer": {"learning_rate": 3e-3},
            "batch": {"micro_batch_tokens": 512},
            "lora": {"rank": 8, "alpha": 16.0},
        }
    )


def new_tasks(world: World, count: int, draw: random.Random) -> list[Task]:
    return [new_task(str(number), world, draw) for number in range(count)]


def credited_rows(played: Sequence[PlayedEpisode], arm: Arm, rule: CreditOptions) -> list[Row]:
    """Return the training rows of a wave, with the trainer's credit."""
    rewards = [episode.state.reward for episode in played]
    if arm.unbounded:
        for number, episode in enumerate(played):
            scores = [rule.air_scores[turn.outcome.status] for turn in episode.turns]
            rewards[number] += arm.air_lambda * sum(scores)
    credit = assign_credit(as_groups(played, rewards), rule, policy=POLICY, oldest_version=0)
    return training_rows(credit.transitions)


def _summarise(episodes: int, played: Sequence[PlayedEpisode]) -> Look:
    tools = [turn.outcome.tool for episode in played for turn in episode.turns]
    r_final = sum(episode.state.reward for episode in played) / len(played)
    return Look(episodes, r_final, len(tools) / len(played), tools.count(NOTE) / len(played))


def use_one_thread() -> None:
    """Make a worker process compute in one thread, without progress bars."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
