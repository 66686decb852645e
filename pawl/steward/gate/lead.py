"""Follow how far a version is above the base model, while it is a canary."""

from collections.abc import Iterable

from pawl.steward.gate.blocks import Block, Blocks, block_size
from pawl.steward.gate.records import BASE, CANARY, SERVING, Episode, GateOptions
from pawl.steward.gate.reference import Reference, reference_of


class Lead:
    """Compare a canary with the base model, in the order of their episodes.

    It does not end with the trial's verdict: episodes that began before the promotion, and count
    only after it, are as good.
    """

    def __init__(self, options: GateOptions, *, base_serves: bool = False) -> None:
        """Begin without episodes. If the base is what serves, it has no arm of its own."""
        self._options = options
        self._other = SERVING if base_serves else BASE
        served = 1 - options.canary_share - options.base_share
        other = served if base_serves else options.base_share
        self._rewards = Blocks(block_size(options.canary_share, other))
        self._blocks: list[Block] = []

    def extend(self, episodes: Iterable[Episode]) -> None:
        """Take in more episodes, in order of their first calls; other arms are passed over."""
        for episode in episodes:
            if episode.arm not in (CANARY, self._other):
                continue
            value = self._options.scaled(episode)
            if value is None:
                continue
            block = self._rewards.add(episode.arm == CANARY, episode.family, value)
            if block is not None:
                self._blocks.append(block)

    def reference(self) -> Reference:
        """Return how far the canary was above the base, for the watch over it once it serves."""
        return reference_of(self._blocks)
