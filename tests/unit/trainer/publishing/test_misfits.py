"""What does not fit between server and trainer is named, with its remedy."""

import math

import msgspec
import pytest

from trainer.publishing.probe import Compared, why_misfit

FITS = Compared(
    served_base=(-1.0, -2.0),
    own_base=(-1.01, -2.0),
    served_adapter=(-1.8, -2.9),
    own_adapter=(-1.8, -2.91),
    served_sampled=(-3.0, -4.0),
    own_sampled=(-3.01, -4.0),
    own_raw=(-5.0, -7.0),
)
CASES = {
    "another base": ({"served_base": (-4.0, -2.0)}, "PAWL_MODEL"),
    "a base that computes no number": ({"served_base": (math.nan, -2.0)}, "PAWL_MODEL"),
    "an adapter that is not applied": ({"served_adapter": (-1.0, -2.0)}, "does not apply"),
    "half an adapter": ({"served_adapter": (-1.7, -2.7)}, "otherwise than the trainer"),
    "raw log-probabilities": ({"served_sampled": (-5.0, -7.0)}, "as they were before temperature"),
    "some others": ({"served_sampled": (-9.0, -7.0)}, "options that change what is sampled"),
}


def test_what_fits_fits() -> None:
    assert why_misfit(FITS, 0.05) is None


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_named(case: str) -> None:
    changes, said = CASES[case]
    why = why_misfit(msgspec.structs.replace(FITS, **changes), 0.05)
    assert why is not None
    assert said in why
