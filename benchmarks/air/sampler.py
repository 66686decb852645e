"""Play all episodes of a wave in step, and keep token ids and log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.air.base import ID
from benchmarks.air.task import CALL_WORDS, END, WORDS, Outcome, State, Task, begin, take


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold one call, and what came of it."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    outcome: Outcome


@dataclass(slots=True)
class Played:
    """Hold an episode as far as it came."""

    task: Task
    ids: list[int]
    state: State
    turns: list[Turn]


class Sampler:
    """Sample with a version that the learner saved, or with the base model."""

    def __init__(self, base: str, seed: int) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(base).eval()
        self._model: Any = self._base
        self._random = torch.Generator().manual_seed(seed)

    def load(self, adapter: Path) -> None:
        """Load the version to sample with from now on."""
        if self._model is self._base:
            self._model = get_peft_model(self._base, LoraConfig.from_pretrained(str(adapter)))
            self._model.eval()
        weights = load_file(adapter / "adapter_model.safetensors")
        set_peft_model_state_dict(self._model, weights)

    @torch.inference_mode()
    def play(self, tasks: Sequence[Task]) -> list[Played]:
        """Play one episode of each task (a task may be there many times), at temperature one."""
        episodes = [
            Played(task, [ID[word] for word in task.prompt], begin(task), []) for task in tasks
        ]
        reader = _Reader(self._model, len(tasks))
        logits = reader.read([episode.ids for episode in episodes])
        while not all(episode.state.ended for episode in episodes):
            said = self._say(reader, logits, [episode.state.ended for episode in episodes])
            replies = [_answer(*pair) for pair in zip(episodes, said, strict=True)]
            logits = reader.read(replies)
        return episodes

    def _say(
        self, reader: "_Reader", logits: Tensor, silent: list[bool]
    ) -> list[list[tuple[int, float]]]:
        """Sample each row's next call, token by token, with the log-probabilities of its tokens."""
        said: list[list[tuple[int, float]]] = [[] for _ in silent]
        ended = list(silent)
        for place in range(CALL_WORDS):
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=self._random)
            chosen = logprobs.gather(1, drawn)[:, 0].tolist()
            tokens = drawn[:, 0].tolist()
            fed: list[list[int]] = [[] for _ in silent]
            for row, (token, logprob) in enumerate(zip(tokens, chosen, strict=True)):
                if not ended[row]:
                    said[row].append((token, logprob))
                    fed[row] = [token]
                    ended[row] = token == ID[END]
            if place + 1 < CALL_WORDS and all(ended):
                reader.read(fed)
                break
            logits = reader.read(fed)
        return said


def _answer(episode: Played, said: list[tuple[int, float]]) -> list[int]:
    """Take a row's call to its task; the ids of the reply that the policy reads next."""
    if episode.state.ended:
        return []
    sampled = tuple(token for token, _ in said)
    outcome = take(episode.task, episode.state, [WORDS[token] for token in sampled])
    logprobs = tuple(logprob for _, logprob in said)
    episode.turns.append(Turn(tuple(episode.ids), sampled, logprobs, outcome))
    episode.state = outcome.state
    reply = [] if outcome.state.ended else [ID[word] for word in outcome.reply]
    episode.ids += [*sampled, *reply]
    return reply


class _Reader:
    """Read on, all rows at once: a row that has less to read is padded, and the pads masked."""

    def __init__(self, model: Any, rows: int) -> None:
        self._model = model
        self._cache = DynamicCache()
        self._mask = torch.zeros(rows, 0, dtype=torch.long)

    def read(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """Return logits (B, V) after each row's piece; of no meaning for a row that has none."""
        width = max(1, *(len(piece) for piece in pieces))
        padded = [[0] * (width - len(piece)) + list(piece) for piece in pieces]
        mask = [[0] * (width - len(piece)) + [1] * len(piece) for piece in pieces]
        self._mask = torch.cat([self._mask, torch.tensor(mask)], dim=1)
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        logits: Tensor = self._model(
            input_ids=torch.tensor(padded),
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        return logits
