"""Count the episodes of an arm."""

from pawl.steward.gate.records import ArmFigures, Episode, GateOptions


class ArmCount:
    """Count the episodes of one arm as they come."""

    def __init__(self, options: GateOptions) -> None:
        """Begin with none."""
        self._options = options
        self._episodes = self._failed = self._clipped = self.scored = 0
        self._total = 0.0

    def add(self, episode: Episode, value: float | None) -> None:
        """Count one more, with its scaled reward (0 to 1), or None if it is unscored."""
        self._episodes += 1
        self._failed += episode.failed
        self._clipped += self._options.clips(episode)
        if value is not None:
            self.scored += 1
            self._total += value

    def figures(self) -> ArmFigures:
        """Return what was counted, with the mean in units of the reward."""
        low, width = self._options.reward_range[0], self._options.width
        mean = low + width * self._total / max(self.scored, 1)
        return ArmFigures(
            episodes=self._episodes,
            unscored=self._episodes - self.scored,
            failed=self._failed,
            mean=mean if self.scored else None,
            clipped=self._clipped,
        )
