"""Define what is trained in a run, and how."""

from typing import Final

GROUPS: Final = 2
MEMBERS: Final = 4
STEPS: Final = 2
# Of learners that compare no episode with its group. Half of each group is imitated.
CREDIT: Final = {
    "ppo": 'baseline = "none"\nnormalisation = "batch"',
    "sft": 'baseline = "none"\nnormalisation = "none"\n'
    f"[sft]\nmin_reward = 0.0\nmost_per_task = {MEMBERS // 2}",
}


def recipe_toml(learner: str, baseline: str) -> str:
    """Return a recipe of two optimiser steps an update.

    PPO has its critic as the baseline and SFT has none, whatever `baseline` says.
    """
    credit = CREDIT.get(learner, f'baseline = "{baseline}"')
    return f"""
learner = "{learner}"
[claim]
group_size = {MEMBERS}
groups = {GROUPS}
max_age_s = 1e9
max_staleness = 1000000
[credit]
{credit}
[optimizer]
learning_rate = 2e-3
[batch]
steps = {STEPS}
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
retire_after_s = 1e9
"""
