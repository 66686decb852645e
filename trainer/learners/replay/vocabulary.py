"""Find the token ids that a call's words and stops stand for, as vLLM finds them.

The rules are those of `SamplingParams.update_from_tokenizer` and `update_from_generation_config`
(`vllm/sampling_params.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from store.values.distribution import Distribution
from trainer.batches import Row

Ids = tuple[int, ...]


class Vocabulary:
    """Turn words and stops into the ids of one model."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        """Store the tokenizer, and the ids that end a reply of `model`."""
        self._tokenizer = tokenizer
        own = getattr(model.generation_config, "eos_token_id", None)
        listed = own if isinstance(own, list) else [own]
        self._ends = {end for end in (*listed, tokenizer.eos_token_id) if end is not None}

    def spell_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows, with the ids of what their settings name."""
        spelled = {one: self.spelled(one) for one in {row.distribution for row in rows}}
        return [
            row
            if spelled[row.distribution] is row.distribution
            else msgspec.structs.replace(row, distribution=spelled[row.distribution])
            for row in rows
        ]

    def spelled(self, one: Distribution) -> Distribution:
        """Return settings with the ids of what they name."""
        if one.bad_words:
            one = msgspec.structs.replace(
                one, banned_ids=banned_sequences(one.bad_words, self._encode)
            )
        if one.min_tokens or one.grammar is not None:
            stops = self._ends.union(one.stop_token_ids)
            one = msgspec.structs.replace(one, stop_token_ids=tuple(sorted(stops)))
        return one

    def _encode(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def banned_sequences(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[Ids, ...]:
    """Return the sequences whose last id must not complete them, for words in any place of a text.

    A word that follows a space counts where that makes another first token of an equal number.
    """
    sequences: list[Ids] = []
    for word in words:
        alone, inside = (tuple(encode(space + word.lstrip())) for space in ("", " "))
        if alone:
            sequences.append(alone)
        if alone and inside and inside[0] != alone[0] and len(inside) == len(alone):
            sequences.append(inside)
    return tuple(sequences)
