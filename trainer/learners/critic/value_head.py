"""Keep the critic beside the adapter: one linear layer on the LM head's inputs.

It is a child of the PEFT wrapper, not of the base model: `unload` leaves it behind, LoRA's
"all-linear" does not adapt it, and PEFT's adapter file, which the model server reads, does
not contain it. It starts at zero, so that the first update's advantages are its returns.
"""

from typing import Any, Final

import torch
from torch import Tensor

from trainer.learners.scoring import Scored

NAME: Final = "value_head"


def add_value_head(trainer: Any, learning_rate: float) -> torch.nn.Linear:
    """Add a critic to the trainer's model, and its parameters to the optimiser; return it."""
    model = trainer.model
    width = model.get_output_embeddings().in_features
    head = torch.nn.Linear(width, 1, device=model.device, dtype=torch.float32)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model.add_module(NAME, head)
    trainer.optimizer.add_param_group(
        {"params": list(head.parameters()), "lr": learning_rate, "weight_decay": 0.0}
    )
    return head


def values_of(critic: torch.nn.Linear, scored: Scored) -> Tensor:
    """Return V (M,) before each token, from the hidden states that predict it.

    The states are detached: the value loss moves the critic and never the policy's adapter.
    They are scaled to length one, so that a step of Adam moves a value by no more than √H times
    its rate, whatever the scale of the model's states.
    """
    assert scored.hidden is not None
    states = torch.nn.functional.normalize(scored.hidden.detach().to(critic.weight.dtype), dim=-1)
    values: Tensor = critic(states)[:, 0]
    return values
