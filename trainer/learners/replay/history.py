"""Hold what a call's tokens came after, for the settings that depend on it."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from trainer.batches import Row


class History:
    """Hold what stood before each of R sampled tokens: a prompt, and the reply until then.

    Shapes: `ids` (B, L) are the ids of B rows, padded; the rest is (R,): `rows` says which of
    them, `prompts` how long the prompt is, `sampled` how many tokens of the reply come before.
    """

    def __init__(
        self,
        ids: Tensor,
        rows: Tensor,
        prompts: Tensor,
        sampled: Tensor,
        masks: Sequence[bytes] = (),
    ) -> None:
        """Store the tensors, and the packed masks of a grammar, (R,), if there is one."""
        self._ids = ids
        self._rows = rows
        self._prompts = prompts
        self.sampled = sampled
        self.masks = masks

    @classmethod
    def of(
        cls, rows: Sequence[Row], places: Sequence[tuple[int, int]], device: torch.device
    ) -> Self:
        """Return the history of places: the number of a row, and of sampled tokens before it."""
        used = {row: index for index, row in enumerate(sorted({row for row, _ in places}))}
        ids = [torch.tensor(rows[row].ids, device=device) for row in used]
        prompts = [len(rows[row].prompt_ids) for row, _ in places]
        return cls(
            torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            torch.tensor([used[row] for row, _ in places], device=device),
            torch.tensor(prompts, device=device),
            torch.tensor([sampled for _, sampled in places], device=device),
            [rows[row].masks[sampled] for row, sampled in places if rows[row].masks],
        )

    def part(self, start: int, stop: int) -> "History":
        """Return the history of the tokens from `start` to before `stop`."""
        rows, prompts, sampled = (
            one[start:stop] for one in (self._rows, self._prompts, self.sampled)
        )
        return History(self._ids, rows, prompts, sampled, self.masks[start:stop])

    def everything(self) -> Tensor:
        """Return all ids before each token, (R, T); shorter ones repeat their first id."""
        lengths = self._prompts + self.sampled
        places = torch.arange(int(lengths.max()), device=lengths.device)
        ids = self._ids[self._rows[:, None], places]
        return torch.where(places < lengths[:, None], ids, ids[:, :1])

    def reply(self) -> tuple[Tensor, Tensor]:
        """Return the ids sampled before each token, (R, T), and which of them there are.

        Where a reply is shorter, its first id is repeated; where it is empty, any id stands.
        """
        places = torch.arange(max(1, int(self.sampled.max())), device=self.sampled.device)
        there = places < self.sampled[:, None]
        at = torch.where(there, places, 0) + self._prompts[:, None]
        return self._ids[self._rows[:, None], at], there

    def ends_in(self, ids: Sequence[int]) -> Tensor:
        """Return whether the reply before each token ends in these ids, (R,)."""
        wanted = torch.tensor(ids, dtype=torch.long, device=self.sampled.device)
        places = torch.arange(len(ids), device=self.sampled.device) - len(ids)
        ends = (self._prompts + self.sampled)[:, None]
        newest = self._ids[self._rows[:, None], (ends + places).clamp(min=0)]
        return (self.sampled >= len(ids)) & (newest == wanted).all(1)
