"""Read and write the JSON lines of `pawl credit`: episodes as input, calls as output (pure).

Input lines are those that `pawl export` writes. Fields without an influence on credit are ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypeVar

import msgspec

from store.read.facts import MatchedEvent
from store.records import EVAL, TRAIN, Feedback, Record, Split, ToolStatus
from store.tenants import DEFAULT, bare
from store.values.rewards import REWARD_ALONE, RewardRule, reward_of
from trainer.credit.air import RewardRange
from trainer.credit.assign import UNIT_RANGE, CallCredit, credit_accounts
from trainer.credit.returns import CallAccount, EpisodeAccount, without_side_call_reward
from trainer.errors import CreditLineError
from trainer.recipes.recipe import CreditOptions, SftOptions

# Seconds since 1970, up to the end of the year 9999.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=253402300799)]


class FeedbackLine(Record, frozen=True, kw_only=True):
    """One feedback item; `at` is RFC 3339 (UTC if it names no zone) or seconds since 1970.

    A `value` of None withdraws earlier feedback of the metric. `correction` is the right reply.
    """

    metric: str
    value: float | str | None
    at: datetime | Seconds
    source: str | None = None
    correction: str | None = None

    @property
    def feedback(self) -> Feedback:
        """Return the item as a record of the store; a time without a zone is UTC."""
        at = datetime.fromtimestamp(self.at, UTC) if isinstance(self.at, float) else self.at
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return Feedback(
            metric=self.metric,
            value=self.value,
            at=at,
            source=self.source,
            correction=self.correction,
        )


class EventLine(Record, frozen=True, kw_only=True):
    """One tool event: how a tool that the call requested ended.

    `arguments` is the text that the model wrote, or a digest of the reply if the agent executed it.
    """

    status: ToolStatus
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


class CallLine(Record, frozen=True, kw_only=True):
    call: str
    trainable: bool
    agent: str = "default"
    reason: str | None = None
    sampled_ids: tuple[int, ...] = ()
    tool_events: tuple[EventLine, ...] = ()
    feedback: tuple[FeedbackLine, ...] = ()


class EpisodeLine(Record, frozen=True, kw_only=True):
    """One exported episode.

    Its feedback decides whether it is scored; of `state` only the value `failed` matters.
    """

    episode: str
    state: Literal["scored", "unscored", "failed", "open"]
    feedback: tuple[FeedbackLine, ...]
    calls: tuple[CallLine, ...]
    task: str | None = None
    quarantined: str | None = None
    split: Split = TRAIN
    tenant: str = DEFAULT

    @property
    def key(self) -> tuple[str, str]:
        """Return the episode's unique key: tenant and name."""
        return self.tenant, self.episode


class CreditLine(Record, frozen=True, kw_only=True):
    """One call's credit; fields are written in this order.

    `parts` is each metric's contribution, written if the reward is a sum of metrics.
    `correction` is set for the calls of an update: the loss share of the call's correction, or the
    reason why the correction is not trained.
    """

    episode: str
    call: str
    agent: str
    r_final: float | None
    r_air: float
    r_total: float | None
    advantage: float | None
    weight: float
    reason: str | None
    parts: Mapping[str, float] | msgspec.UnsetType = msgspec.UNSET
    correction: float | str | msgspec.UnsetType = msgspec.UNSET


def read_lines(lines: Iterable[bytes], where: str) -> list[EpisodeLine]:
    """Parse exported episodes, reading only the fields for credit (`read_lines_as`)."""
    return read_lines_as(lines, where, EpisodeLine)


Line = TypeVar("Line", bound=EpisodeLine)


def read_lines_as(lines: Iterable[bytes], where: str, kind: type[Line]) -> list[Line]:
    """Parse the episodes of an input, each as `kind`; blank lines are skipped.

    `where` names the input in error messages.

    Raises:
        CreditLineError: a line does not have the format, or repeats an episode; the message
            names the line, and a field whose value is wrong.
    """
    episodes: list[Line] = []
    line_of: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        episode = _parse_line(line, f"{where}, line {number}", kind)
        first = line_of.setdefault(episode.key, number)
        if first != number:
            raise CreditLineError(
                f"{where}, line {number}: episode {episode.episode!r} is on line {first} already,"
                " and an episode may be trained only once: remove one of the two lines"
            )
        episodes.append(episode)
    return episodes


def credit_lines(
    episodes: Sequence[EpisodeLine],
    rule: CreditOptions,
    kept: SftOptions | None = None,
    reward: RewardRule = REWARD_ALONE,
    reward_range: RewardRange = UNIT_RANGE,
) -> list[CreditLine]:
    """Return the credit of each call, in the order of episodes and calls.

    Episodes of one task of a tenant form a group; an episode without a task is a group of its own.
    `kept` selects the trained episodes (None: all). `reward` is the rule that sums metrics, and
    `reward_range` the lowest and highest reward.
    """
    groups: dict[object, list[EpisodeLine]] = {}
    for index, line in enumerate(episodes):
        name = index if line.task is None else (line.tenant, line.task)
        groups.setdefault(name, []).append(line)
    accounts = [[_episode_account(line, reward) for line in members] for members in groups.values()]
    credited = credit_accounts(accounts, rule, kept=kept, reward_range=reward_range)
    lines = [line for members in groups.values() for line in members]
    credit_of = {line.key: own for line, own in zip(lines, credited.calls, strict=True)}
    return [
        credit_line(line.episode, call.call, call.agent, credit)
        for line in episodes
        for call, credit in zip(line.calls, credit_of[line.key], strict=True)
    ]


def credit_line(episode: str, call: str, agent: str, credit: CallCredit) -> CreditLine:
    """Return the output line of one call; a tenant prefix of the episode's name is removed."""
    return CreditLine(
        episode=bare(episode),
        call=call,
        agent=agent,
        r_final=credit.r_final,
        r_air=credit.r_air,
        r_total=credit.r_total,
        advantage=credit.advantage,
        weight=credit.weight,
        reason=credit.reason,
        parts=credit.parts or msgspec.UNSET,
    )


def _parse_line(line: bytes, where: str, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise CreditLineError(f"{where}{f', {field}' if field else ''}: {message}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CreditLineError(
            f"{where} is not JSON ({error}): write one episode per line, as `pawl export` does"
        ) from error


def _episode_account(line: EpisodeLine, rule: RewardRule) -> EpisodeAccount:
    return EpisodeAccount(
        task=line.task,
        failed=line.state == "failed",
        earned=reward_of((item.feedback for item in line.feedback), rule),
        calls=tuple(_call_account(call, rule) for call in line.calls),
        excluded=_exclusion_reason(line),
    )


def _exclusion_reason(line: EpisodeLine) -> str | None:
    if line.split == EVAL:
        return "evaluation"
    return None if line.quarantined is None else "quarantined"


def _call_account(line: CallLine, rule: RewardRule) -> CallAccount:
    account = CallAccount(
        agent=line.agent,
        trainable=line.trainable,
        reason=line.reason,
        sampled=len(line.sampled_ids),
        earned=reward_of((item.feedback for item in line.feedback), rule),
        events=tuple(
            MatchedEvent(
                id=event.id, tool=event.name, arguments=event.arguments, status=event.status
            )
            for event in line.tool_events
        ),
    )
    return without_side_call_reward(account)
