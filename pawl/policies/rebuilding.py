"""Show what a rebuild would do, how far it is, and what it came to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from store.rebuilding.line import Done
from store.rebuilding.outlook import Missing, Outlook
from store.records import Record

if TYPE_CHECKING:
    from trainer.rebuilding.rebuild import Result

# Versions that a message names.
TOLD = 8


class Forecast(Record, frozen=True, kw_only=True):
    """Say what a rebuild would do, with the fields in the order in which they are written.

    Attributes:
        policy: the policy's name.
        replaces: the version that the line has come to.
        begins_at: the version from which the first update is done again.
        updates: how many updates are done again.
        episodes: how many episodes of the line are left out, those of earlier rebuilds among them.
        waiting: how many that no update has claimed are consumed.
        missing: what cannot be read any more of the updates to do again, and is not left out.
    """

    policy: str
    replaces: str
    begins_at: str
    updates: int
    episodes: int
    waiting: int
    missing: tuple[Missing, ...]


def forecast(policy: str, seen: Outlook, done: Done, missing: list[Missing]) -> Forecast:
    """Return what a rebuild would do that goes on from `done`."""
    again = len(seen.line.items) - len(done.rows) if seen.of_line else 0
    return Forecast(
        policy=policy,
        replaces=f"{policy}@{seen.head.version}",
        begins_at=f"{policy}@{done.version}",
        updates=again,
        episodes=seen.of_line,
        waiting=len(seen.waiting),
        missing=tuple(missing) if again else (),
    )


def as_text(plan: Forecast) -> str:
    """Return a forecast in words."""
    if not plan.episodes:
        return (
            f"{plan.replaces} and the versions before it were trained on none of these episodes:"
            f" nothing is rebuilt; {plan.waiting} that wait would be consumed"
        )
    line = (
        f"{plan.updates} updates of {plan.policy} are trained again from {plan.begins_at}, without"
        f" {plan.episodes} episodes that they were trained on or compared with; their last version"
        f" replaces {plan.replaces}, and the old ones are retired; {plan.waiting} episodes that"
        " wait are consumed"
    )
    if plan.missing:
        line += (
            f"; refused, because {len(plan.missing)} more episodes cannot be read any more"
            " (`--json` names them; `--leave-out-missing` leaves them out, too)"
        )
    return line


def outcome(result: "Result") -> str:
    """Return in words what a rebuild came to."""
    name = f"{result.version.name}@{result.version.version}"
    if not result.updates:
        return f"{name} {result.version.state}; {result.waiting} waiting episodes are consumed"
    if result.same:
        return f"{name} has the same weights as the version that serves, which serves on"
    line = {
        "serving": f"{name} serves",
        "written": f"{name} is written: the policy's trainer publishes it when it starts",
    }.get(result.version.state, f"{name} is {result.version.state}")
    line += f"; {result.updates} updates, without {result.left_out} episodes"
    if result.retired:
        more = len(result.retired) - TOLD
        names = ", ".join(result.retired[:TOLD]) + (f" and {more} more" if more > 0 else "")
        line += f"; retired: {names}"
    if result.differs:
        line += (
            f"; {', '.join(result.differs[:TOLD])} came out with other bytes, though nothing was"
            " left out: another PAWL_SEED, machine or build of torch than then"
        )
    return line


@contextmanager
def shown() -> Iterator[Callable[[int, int], None]]:
    """Show on standard error how many updates are done; yield what is to be told of each."""
    columns = (TextColumn("updates"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("updates", total=None)

        def tell(done: int, of: int) -> None:
            progress.update(task, completed=done, total=of)

        yield tell
