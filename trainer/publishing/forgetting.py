"""Refuse a version that has gone further from its base model than the recipe allows (pure)."""

from store.schema.trained import KL_TO_BASE, MOST_KL_TO_BASE
from store.versions import PolicyVersion
from trainer.errors import TooFar
from trainer.recipes.gate import GateOptions


def is_too_far(version: PolicyVersion, gate: GateOptions) -> bool:
    """Return whether a version's KL to the base model is above the recipe's bound.

    Of an import there is none: it was trained on nothing here.
    """
    kl, most = version.kl_to_base, gate.most_kl_to_base
    return kl is not None and most is not None and kl > most


def check_forgetting(version: PolicyVersion, gate: GateOptions) -> None:
    """Check a version's KL to the base model against the recipe's bound, if there are both.

    Raises:
        TooFar: it is above the bound.
    """
    if not is_too_far(version, gate):
        return
    kl, most = version.kl_to_base, gate.most_kl_to_base
    raise TooFar(
        f"its KL to the base model is {kl:.4g} nats a token on what it was trained on, and"
        f" gate.most_kl_to_base is {most:g}: it may have forgotten what it was not trained on; set"
        " kl.coefficient, lower optimizer.learning_rate, or raise the bound",
        {KL_TO_BASE: kl, MOST_KL_TO_BASE: most},
    )
