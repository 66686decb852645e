"""Refuse a version that has gone further from its base model than the recipe allows (pure)."""

from store.schema.trained import KL_TO_BASE
from store.versions import PolicyVersion
from trainer.errors import TooFar
from trainer.recipes.gate import GateOptions


def check_forgetting(version: PolicyVersion, gate: GateOptions) -> None:
    """Check a version's KL to the base model against the recipe's bound, if there are both.

    Of an import there is none: it was trained on nothing here.

    Raises:
        TooFar: it is above the bound.
    """
    kl, most = version.kl_to_base, gate.most_kl_to_base
    if kl is None or most is None or kl <= most:
        return
    raise TooFar(
        f"its KL to the base model is {kl:.4g} nats a token on what it was trained on, and"
        f" gate.most_kl_to_base is {most:g}: it may have forgotten what it was not trained on; set"
        " kl.coefficient, lower optimizer.learning_rate, or raise the bound",
        {KL_TO_BASE: kl, "most_kl_to_base": most},
    )
