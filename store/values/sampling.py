"""Find the temperature that vLLM samples with, given the requested one (pure).

vLLM raises temperatures between 0 and its least temperature to the latter
(`SamplingParams.__post_init__` in `vllm/sampling_params.py`); 0 is greedy. The proxy records
temperatures by this rule. The trainer applies it again on reading, because a ledger may hold
temperatures that an earlier Pawl recorded as they were sent.
"""

import math
import re
from typing import Final

LEAST_TEMPERATURE: Final = 0.01
# Only plain numbers, which Python's `float` and vLLM read alike.
_NUMBER: Final = re.compile(r"[ \t\r\n]*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[ \t\r\n]*", re.ASCII)


def number_of(value: object) -> float | None:
    """Return a setting as the finite number that vLLM reads it as, or None if it is not one.

    vLLM's request classes use pydantic's lax mode: a string that holds a number is that number,
    true is 1 and false is 0.
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


def used_temperature(requested: object) -> float | None:
    """Return the temperature used for the requested one, or None if no server accepts it."""
    number = number_of(requested)
    if number is None or number < 0:
        return None
    return max(number, LEAST_TEMPERATURE) if number else 0.0
