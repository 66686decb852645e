"""Count the episodes of an arm."""

from pawl.steward.gate.records import ArmFigures, Episode, GateOptions


class ArmCount:
    """Count the episodes of one arm as they come."""

    def __init__(self) -> None:
        """Begin with none."""
        self._episodes = self._failed = self.scored = 0
        self._total = 0.0

    def add(self, episode: Episode, value: float | None) -> None:
        """Count one more, with its scaled reward (0 to 1), or None if it is unscored."""
        self._episodes += 1
        self._failed += episode.failed
        if value is not None:
            self.scored += 1
            self._total += value

    def figures(self, options: GateOptions) -> ArmFigures:
        """Return what was counted, with the mean in units of the reward."""
        mean = options.reward_range[0] + options.width * self._total / max(self.scored, 1)
        return ArmFigures(
            episodes=self._episodes,
            unscored=self._episodes - self.scored,
            failed=self._failed,
            mean=mean if self.scored else None,
        )
