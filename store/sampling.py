"""The temperature that vLLM samples with, where another was asked for (pure).

vLLM raises what lies between 0 and its least temperature to that (`SamplingParams.__post_init__`
in `vllm/sampling_params.py`); 0 is greedy. The proxy records by this rule. The trainer reads by
it, too: a ledger may hold temperatures that an earlier Pawl recorded as they were sent.
"""

import math
import re
from typing import Final

LEAST_TEMPERATURE: Final = 0.01
# Of what Python reads as a number only the plain ones: vLLM reads these the same.
_NUMBER: Final = re.compile(r"[ \t\r\n]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[ \t\r\n]*", re.ASCII)


def number_of(value: object) -> float | None:
    """Return a setting as the finite number that vLLM reads it as; None if it is none.

    Its request classes take a number in a string for that number, and true and false for 1 and 0
    (pydantic's lax mode).
    """
    if isinstance(value, str):
        return _finite(value) if _NUMBER.fullmatch(value) else None
    return _finite(value) if isinstance(value, int | float) else None


def _finite(value: str | float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def used_temperature(asked: object) -> float | None:
    """Return the temperature used for one that was asked for; None if no server takes it."""
    number = number_of(asked)
    if number is None or number < 0:
        return None
    return max(number, LEAST_TEMPERATURE) if number else 0.0
