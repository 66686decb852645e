"""Find normalisations by the names that recipes give (pure)."""

from collections.abc import Mapping
from functools import cache

import trainer.credit.normalisations
from trainer.credit.normalisations.normalisation import Normalisation
from trainer.credit.registry import implementations


@cache
def normalisations() -> Mapping[str, Normalisation]:
    """Return all normalisations by name."""
    return implementations(trainer.credit.normalisations, "NORMALISATION")


def normalisation_names() -> tuple[str, ...]:
    """Return the names of all normalisations."""
    return tuple(normalisations())
