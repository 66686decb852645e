"""Name what makes the TRL trainer of each learner, by the recipe's `learner`."""

from typing import Final

from trainer.learners.losses.grpo import make_trainer
from trainer.learners.losses.ppo import make_ppo_trainer
from trainer.learners.losses.sft import make_sft_trainer

TRAINERS: Final = {"grpo": make_trainer, "ppo": make_ppo_trainer, "sft": make_sft_trainer}
