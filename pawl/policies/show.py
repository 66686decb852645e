"""Show the versions of a policy with their evaluation."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.commands.common import cell
from pawl.policies.events import trial_of, unwatched_of, waiting_of
from pawl.policies.lookup import policy_versions
from pawl.steward.gate.records import Decision
from store.policy_table import PolicyTable
from store.read.evaluations import evaluations
from store.records import Record
from store.versions import PolicyState, PolicyVersion
from trainer.errors import FileMissing, FilesUnread
from trainer.publishing.adapters import reading, why_altered

TEXTS = ("version", "state")


class VersionLine(Record, frozen=True, kw_only=True):
    """Describe one version of a policy, with the fields in the order in which they are written.

    `eval_episodes` were evaluated and `scored` of them have a reward; the mean of these rewards
    lies in the 95 % interval from `low` to `high`. `files_deleted` says that its adapter is gone,
    as nothing could ask for it any more; `altered` that its files on this machine, if it has them,
    are not those that were written, and `unread` that they cannot be read for now. `ended` says
    that the policy's line started again before it (`pawl policies retrain`); `kl_to_base` how far
    it is from the base model, in nats a token on what it was trained on. `explore` is there
    only on the version that serves, if the policy explores; `trial` only on the one that is tried:
    what a gate would decide about it by now, and by what. `waits` is on a candidate whose replay
    could ask nothing: why, and what to do. `unwatched` is on a trained version that
    serves and that live rewards cannot roll back: why, and what to do.
    """

    version: str
    state: PolicyState
    eval_episodes: int = 0
    scored: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    ended: bool = False
    files_deleted: bool = False
    altered: bool = False
    unread: bool = False
    kl_to_base: float | UnsetType = UNSET
    explore: str | UnsetType = UNSET
    trial: Decision | UnsetType = UNSET
    waits: str | UnsetType = UNSET
    unwatched: str | UnsetType = UNSET


async def versions_of(
    engine: AsyncEngine,
    name: str,
    policies: PolicyTable | None = None,
    tenant: str | None = None,
) -> list[VersionLine]:
    """Return the versions of a policy, oldest first; `policies` may say that it explores.

    With `tenant`, only a policy of this tenant is found.

    Raises:
        UnknownPolicy: there is no policy of that name; the message names those that there are.
    """
    async with engine.connect() as connection:
        versions = await policy_versions(connection, name, tenant)
        curve = {point.version: point for point in await evaluations(connection, name)}
        tried = await trial_of(connection, name)
        waits = await waiting_of(connection, name)
        unwatched = await unwatched_of(connection, name)
    spec = None if policies is None else policies.named(name)
    explore = UNSET if spec is None or spec.explore is None else str(spec.explore)
    lines = []
    for version in versions:
        line = VersionLine(
            version=f"{name}@{version.version}",
            state=version.state,
            explore=explore if version.state == "serving" else UNSET,
            unwatched=unwatched if version.state == "serving" and unwatched else UNSET,
            trial=tried[1] if tried and tried[0] == version.version else UNSET,
            waits=waits[1] if waits and waits[0] == version.version else UNSET,
            files_deleted=version.files_deleted,
            ended=version.ended,
            kl_to_base=UNSET if version.kl_to_base is None else version.kl_to_base,
            **_of_files(version),
        )
        point = curve.get(version.version)
        if point is not None:
            line = msgspec.structs.replace(
                line,
                eval_episodes=point.episodes,
                scored=point.scored,
                mean=point.mean,
                low=point.low,
                high=point.high,
            )
        lines.append(line)
    return lines


def _trial(trial: Decision) -> str:
    episodes = ", ".join(f"{one.episodes} {arm}" for arm, one in trial.arms.items())
    clipped = ", ".join(f"{one.clipped} {arm}" for arm, one in trial.arms.items() if one.clipped)
    outside = f", the rewards of {clipped} outside of gate.reward_range" if clipped else ""
    return (
        f"tried: {trial.lower:+.4f} to {trial.upper:+.4f} above what serves, by {episodes}"
        f" episodes{outside} ({trial.kind}: {trial.reason})"
    )


def _of_files(version: PolicyVersion) -> dict[str, bool]:
    """Return whether the version's files, if they are here, are `altered`, or are `unread`."""
    if version.adapter_path is None:
        return {}
    folder = Path(version.adapter_path)
    try:
        with reading(folder):
            folder.stat()
        return {"altered": why_altered(version) is not None}
    except FileMissing:
        return {}
    except FilesUnread:
        return {"unread": True}


def table(lines: Sequence[VersionLine]) -> Table:
    """Return the lines as a table for a terminal, with the interval in one column."""
    explore = [f"explores: {line.explore}" for line in lines if line.explore is not UNSET]
    notes = explore + [_trial(line.trial) for line in lines if line.trial is not UNSET]
    notes += [f"{line.version} waits: {line.waits}" for line in lines if line.waits is not UNSET]
    notes += [
        f"no reward rolls {line.version} back: {line.unwatched}"
        for line in lines
        if line.unwatched is not UNSET
    ]
    grid = Table(box=None, pad_edge=False, caption="\n".join(notes) or None)
    far = ["KL to base"] if any(line.kl_to_base is not UNSET for line in lines) else []
    evaluated = ("eval episodes", "scored", "mean reward", "95 % interval")
    for name in ("version", "state", *evaluated, *far):
        grid.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for line in lines:
        interval = None if line.low is None else f"{cell(line.low)} to {cell(line.high)}"
        more = {
            "ended": line.ended,
            "deleted": line.files_deleted,
            "altered": line.altered,
            "unread": line.unread,
        }
        words = [word for word, is_so in more.items() if is_so]
        state = ", ".join([line.state, *words])
        reward = (line.eval_episodes, line.scored, line.mean, interval)
        shown = [line.version, state, *reward]
        if far:
            shown.append(None if line.kl_to_base is UNSET else line.kl_to_base)
        grid.add_row(*map(cell, shown))
    return grid
