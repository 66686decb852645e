"""`pawl credit`'s JSON lines: an episode each in, as `pawl export` writes them; a call each out.

Of a line that counts for credit is read; what else an export holds is passed over (pure).
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from store.records import REWARD, Feedback, Record, ToolStatus
from trainer.air import AskedEvent
from trainer.credit.accounts import CallAccount, EpisodeAccount, standing_reward
from trainer.credit.calls import CallCredit, credit_accounts
from trainer.errors import CreditLineError
from trainer.recipe_parts import CreditPart

# Years 1970 to 9999, in seconds.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=253402300799)]


class StatementLine(Record, frozen=True, kw_only=True):
    """One statement; `at` is RFC 3339 (UTC where it names no zone), or seconds since 1970."""

    metric: str
    value: float
    at: datetime | Seconds

    @property
    def moment(self) -> datetime:
        """When it was said."""
        if isinstance(self.at, float):
            return datetime.fromtimestamp(self.at, UTC)
        return self.at if self.at.tzinfo is not None else self.at.replace(tzinfo=UTC)


class EventLine(Record, frozen=True, kw_only=True):
    """How a tool ended that the call asked for; `arguments` as the model wrote them."""

    status: ToolStatus
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


class CallLine(Record, frozen=True, kw_only=True):
    """One call."""

    call: str
    trainable: bool
    agent: str = "default"
    reason: str | None = None
    sampled_ids: tuple[int, ...] = ()
    tool_events: tuple[EventLine, ...] = ()
    feedback: tuple[StatementLine, ...] = ()


class EpisodeLine(Record, frozen=True, kw_only=True):
    """One episode. Whether it is scored is for its feedback to say, and `failed` for `state`."""

    episode: str
    state: Literal["scored", "unscored", "failed", "open"]
    feedback: tuple[StatementLine, ...]
    calls: tuple[CallLine, ...]
    task: str | None = None
    quarantined: str | None = None


class CreditLine(Record, frozen=True, kw_only=True):
    """What one call is worth, in the order of the keys that are written."""

    episode: str
    call: str
    agent: str
    r_final: float | None
    r_air: float
    r_total: float | None
    advantage: float | None
    weight: float
    reason: str | None


def read_lines(lines: Iterable[bytes], where: str) -> list[EpisodeLine]:
    """The episodes of an input; `where` names it in messages, and blank lines are passed over.

    Raises:
        CreditLineError: a line is not as the format says; the message names it and the field.
    """
    found: list[EpisodeLine] = []
    places: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        episode = _read(line, f"{where}, line {number}")
        before = places.setdefault(episode.episode, number)
        if before != number:
            raise CreditLineError(
                f"{where}, line {number}: episode {episode.episode!r} is on line {before} already;"
                " an episode is trained once: leave one of them out"
            )
        found.append(episode)
    return found


def credit_lines(episodes: Sequence[EpisodeLine], rule: CreditPart) -> list[CreditLine]:
    """What each call is worth, in the order of episodes and calls.

    Episodes of one task are a group; one without a task is alone.
    """
    groups: dict[object, list[EpisodeLine]] = {}
    for place, line in enumerate(episodes):
        groups.setdefault(place if line.task is None else line.task, []).append(line)
    accounts = [[_account(line) for line in members] for members in groups.values()]
    found = credit_accounts(accounts, rule)
    lines = [line for members in groups.values() for line in members]
    credit_of = {line.episode: own for line, own in zip(lines, found.calls, strict=True)}
    return [
        credit_line(line.episode, call.call, call.agent, credit)
        for line in episodes
        for call, credit in zip(line.calls, credit_of[line.episode], strict=True)
    ]


def credit_line(episode: str, call: str, agent: str, credit: CallCredit) -> CreditLine:
    """One call's line."""
    return CreditLine(
        episode=episode,
        call=call,
        agent=agent,
        r_final=credit.r_final,
        r_air=credit.r_air,
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        reason=credit.reason,
    )


def _read(line: bytes, where: str) -> EpisodeLine:
    try:
        return msgspec.json.decode(line, type=EpisodeLine)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise CreditLineError(f"{where}{f', {field}' if field else ''}: {message}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CreditLineError(
            f"{where} is not JSON ({error}): write one episode a line, as `pawl export` does"
        ) from error


def _account(line: EpisodeLine) -> EpisodeAccount:
    return EpisodeAccount(
        task=line.task,
        failed=line.state == "failed",
        reward=_reward(line.feedback),
        calls=tuple(_call(call) for call in line.calls),
        set_aside=None if line.quarantined is None else "quarantined",
    )


def _call(line: CallLine) -> CallAccount:
    return CallAccount(
        agent=line.agent,
        trainable=line.trainable,
        reason=line.reason,
        sampled=len(line.sampled_ids),
        reward=_reward(line.feedback),
        events=tuple(
            AskedEvent(id=event.id, tool=event.name, arguments=event.arguments, status=event.status)
            for event in line.tool_events
        ),
    )


def _reward(statements: Sequence[StatementLine]) -> float | None:
    return standing_reward(
        [
            Feedback(metric=one.metric, value=one.value, at=one.moment)
            for one in statements
            if one.metric == REWARD
        ]
    )
