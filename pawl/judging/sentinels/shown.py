"""Decide what a judge is shown of a sentinel, and what its answer says (pure)."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Final
from uuid import UUID

import msgspec

from pawl.judging.answers import Statement
from pawl.judging.errors import JudgeFailed
from proxy.errors import BadRequest
from proxy.feedback.statements import parse_feedback
from store.read.lines import encoded_line
from store.records import Episode

# What is beyond is no score that anybody means, and its sums are no numbers any more.
MOST_SCORE: Final = 1e100


def sentinel_line(episode: Episode) -> bytes:
    """Return the line that a judge is shown of an episode that nobody has scored.

    It is the same whenever it is made, as long as the episode's calls and tool events are: what was
    stated since is left out, the judge's own score too.

    Raises:
        Damaged: the episode cannot be read back.
    """
    unscored = msgspec.structs.replace(
        episode,
        feedback=(),
        quarantined_reason=None,
        calls=tuple(msgspec.structs.replace(call, feedback=()) for call in episode.calls),
    )
    return encoded_line(unscored, episode.last_call_at, timedelta(0))


def digest_of_line(line: bytes) -> UUID:
    """Return the first 16 bytes of the SHA-256 of a line."""
    return UUID(bytes=sha256(line).digest()[:16])


def score_of(statements: Sequence[Statement], metric: str) -> float | None:
    """Return the mean of what an answer states of a metric; None: it states nothing of it.

    The answer is checked as `/feedback` would check it.

    Raises:
        JudgeFailed: `/feedback` would refuse the answer, or what it states is no number.
    """
    if not statements:
        return None
    try:
        record = parse_feedback(msgspec.json.encode(statements), datetime.now(UTC), None)
    except BadRequest as error:
        raise JudgeFailed(f"/feedback would refuse the judge's answer: {error}") from error
    values = [item.value for item in record.items if item.metric == metric]
    numbers = [value for value in values if isinstance(value, float) and abs(value) <= MOST_SCORE]
    if len(numbers) < len(values):
        raise JudgeFailed(
            f"the judge's values of {metric} are no numbers that can be compared: sentinels need a "
            f"metric of numbers up to {MOST_SCORE:g}; name another with `pawl sentinels add "
            "--metric`"
        )
    return sum(numbers) / len(numbers) if numbers else None
