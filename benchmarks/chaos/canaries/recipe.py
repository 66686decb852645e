"""Define how versions are trained and tried in a run, and what their episodes are worth."""

from collections import Counter
from random import Random
from typing import Final

GROUP: Final = 4
# Rewards of the base model, of good versions, and of bad ones; each has some noise.
BASE, GOOD, BAD = 0.5, 0.9, 0.1
NOISE: Final = 0.1
# Of every five versions one is bad, and one turns bad after so many episodes: it serves by then.
CYCLE: Final = 5
BAD_ONE: Final = 2
TURNS: Final = 3
TURNS_AFTER: Final = 250

RECIPE: Final = f"""
learner = "grpo"
[claim]
group_size = {GROUP}
groups = 2
smallest_group = 2
max_age_s = 5.0
max_staleness = 1000000
[optimizer]
learning_rate = 1e-3
[batch]
steps = 1
micro_batch_tokens = 64
[off_policy]
sequence_min = 0.0
sequence_max = 1e9
max_drift = 1e9
min_effective_sample = 0.0
[lora]
rank = 4
alpha = 8
[publish]
tolerance = 1e-3
retire_after_s = 5.0
[gate]
mode = "gated"
canary_share = 0.4
base_share = 0.2
margin = 0.1
reward_delay_s = 2.0
deadline_s = 40.0
mistakes = 0.2
fewest = 20
"""


class Worth:
    """Say what an episode of a version is worth, as a judge would."""

    def __init__(self, seed: int) -> None:
        self._dice = Random(seed)
        self._episodes: Counter[int] = Counter()

    def of(self, version: int) -> float:
        """Return the reward of one more episode of a version."""
        self._episodes[version] += 1
        return self._level(version) + self._dice.uniform(-NOISE, NOISE)

    def _level(self, version: int) -> float:
        if version == 0:
            return BASE
        if version % CYCLE == BAD_ONE:
            return BAD
        has_turned = self._episodes[version] > TURNS_AFTER
        return BAD if version % CYCLE == TURNS and has_turned else GOOD
