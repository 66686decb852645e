"""Show the versions of a policy with their evaluation."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from rich.table import Table
from sqlalchemy.ext.asyncio import AsyncEngine

from pawl.output import cell
from pawl.policies.found import found_versions
from store.policy_table import PolicyTable
from store.read.evaluations import evaluations
from store.records import PolicyState, Record

TEXTS = ("version", "state")


class VersionLine(Record, frozen=True, kw_only=True):
    """Describe one version of a policy, with the fields in the order in which they are written.

    `eval_episodes` were evaluated and `scored` of them have a reward; the mean of these rewards
    lies in the 95 % interval from `low` to `high`. `files_deleted` says that its adapter is gone,
    as nothing could ask for it any more. `explore` is there only on the version that serves, if
    the policy explores.
    """

    version: str
    state: PolicyState
    eval_episodes: int = 0
    scored: int = 0
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    files_deleted: bool = False
    explore: str | UnsetType = UNSET


async def versions_of(
    engine: AsyncEngine, name: str, policies: PolicyTable | None = None
) -> list[VersionLine]:
    """Return the versions of a policy, oldest first; `policies` may say that it explores.

    Raises:
        UnknownPolicy: there is no policy of that name; the message names those that there are.
    """
    async with engine.connect() as connection:
        versions = await found_versions(connection, name)
        curve = {point.version: point for point in await evaluations(connection, name)}
    spec = None if policies is None else policies.named(name)
    explore = UNSET if spec is None or spec.explore is None else str(spec.explore)
    lines = []
    for version in versions:
        line = VersionLine(
            version=f"{name}@{version.version}",
            state=version.state,
            explore=explore if version.state == "serving" else UNSET,
            files_deleted=version.files_deleted,
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


def table(lines: Sequence[VersionLine]) -> Table:
    """Return the lines as a table for a terminal, with the interval in one column."""
    explore = [f"explores: {line.explore}" for line in lines if line.explore is not UNSET]
    grid = Table(box=None, pad_edge=False, caption=" ".join(explore) or None)
    for name in ("version", "state", "eval episodes", "scored", "mean reward", "95 % interval"):
        grid.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for line in lines:
        interval = None if line.low is None else f"{cell(line.low)} to {cell(line.high)}"
        state = f"{line.state}, deleted" if line.files_deleted else line.state
        shown = (line.version, state, line.eval_episodes, line.scored, line.mean, interval)
        grid.add_row(*[cell(value) for value in shown])
    return grid
