"""Kill processes and stop the database under load, and check that nothing is lost.

`--target proxy`: `pawl proxy` with an embedded PostgreSQL and a model server that answers at once,
in one of three tests (`--kills`, `--outage`, `--feedback`). Between kills the spool's small disk is
full or gives I/O errors for a moment, and one record in 200 is poisoned; `--plain` leaves these
faults out, and needs neither root nor a C compiler.
`--target trainer`: a real `pawl trainer` for each policy (`--policies 2 --shared`: one trainer of
both); the model server and the controller are killed too, unless `--plain` is given.
`--target canaries`: live episodes decide about versions while all processes are killed;
`--target evaluated`: evaluations decide.

Ends with status 1 if a promise is broken.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.calls import kill_under_load, measure_outage
from benchmarks.chaos.feedback import check_feedback
from benchmarks.chaos.trainer import trainer_kills
from tests.support.controller.canary_kills import canary_kills
from tests.support.faults.stand import CannotInjectFaults, standing
from tests.support.trainer.scored_episodes import CASTS
from tests.support.trainer.zygote import Zygote, zygote

# Figures of a report that must be zero or empty.
PROMISES: Final = (
    *("missing", "twice", "failed", "failed_otherwise", "scrapes_off", "scrapes_failed"),
    *("lost", "spent_otherwise", "states_differ", "files_differ", "by_themselves"),
    *("ended_by_itself", "stalled", "dropped_uncounted", "poison_not_dead", "of_untrained"),
    *("not_loaded", "unquarantined", "returns_differ", "scores_differ", "scores_missing"),
    *("without_arm", "wrong_events"),
)
# Number of list members that are shown.
SHOWN: Final = 10


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        try:
            by_name = run_target(options, Path(folder))
        except CannotInjectFaults as error:
            sys.exit(str(error))
    console, broken = Console(stderr=options.json), []
    for name, report in by_name.items():
        own = broken_promises(report)
        table = Table("", "", title=f"{options.target}: {name}")
        table.caption = "; ".join(own) or "all promises held"
        for key, value in report.items():
            table.add_row(key, count_equal(value) or "none")
        console.print(table)
        broken += own
    if options.json:
        print(json.dumps(by_name | {"broken": broken}))
    sys.exit(1 if broken else 0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=(__doc__ or "").splitlines()[0]
    )
    targets = ("proxy", "trainer", "canaries", "evaluated")
    parser.add_argument("--target", choices=targets, default="proxy")
    parser.add_argument(
        "--policies",
        type=int,
        choices=sorted(CASTS),
        default=1,
        help="in training, each killed its share of --kills (1)",
    )
    parser.add_argument("--shared", action="store_true", help="one trainer of all --policies")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="of the proxy: no faults of the disk; of the trainer: nothing else is killed",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims (1)")
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--kills", type=int, default=100, help="kill -9 so many times (100)")
    act.add_argument("--outage", type=float, help="take the database away for so many seconds")
    act.add_argument("--feedback", type=int, help="kill while so many statements are sent")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    if options.target != "proxy" and (options.outage or options.feedback):
        parser.error(f"--target {options.target} is killed, and nothing else: give it --kills")
    return options


def run_target(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the chosen target and test; return the reports by name."""
    if options.target != "proxy":
        with zygote(folder / "zygote.log") as forks:
            return kill_forks(options, forks, folder)
    has_faults = not (options.outage or options.feedback or options.plain)
    with standing(folder, workers=2, faults=has_faults) as stand:
        if options.feedback:
            return {"feedback": asyncio.run(check_feedback(stand, options.feedback, options.seed))}
        if options.outage:
            return {"outage": asyncio.run(measure_outage(stand, options.outage))}
        return {"kills": asyncio.run(kill_under_load(stand, options.kills, options.seed))}


def kill_forks(
    options: argparse.Namespace, forks: Zygote, folder: Path
) -> dict[str, dict[str, Any]]:
    """Run a target whose processes are forked, which start in no time."""
    if options.target == "trainer":
        how = {"policies": options.policies, "shared": options.shared, "plain": options.plain}
        return trainer_kills(forks, folder, options.kills, options.seed, **how)
    mode: Literal["canary", "evaluated"] = (
        "evaluated" if options.target == "evaluated" else "canary"
    )
    return canary_kills(forks, folder, options.kills, options.seed, mode)


def broken_promises(report: dict[str, Any]) -> list[str]:
    """Return the promises that a run broke, with their figures; empty if none."""
    broken = [f"{name}: {count_equal(report[name])}" for name in PROMISES if report.get(name)]
    if report.get("drain_s", 0.0) is None:
        broken.append("the spool was not drained in time")
    return broken


def count_equal(value: Any) -> str:
    """Format a value; equal members of a list are shown once, with their number."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if not isinstance(value, list):
        return str(value)
    times = Counter(map(str, value)).most_common()
    lines = [f"{count} × {member}" if count > 1 else member for member, count in times[:SHOWN]]
    return "\n".join([*lines, *([f"and {len(times) - SHOWN} more"] if times[SHOWN:] else [])])


if __name__ == "__main__":
    main()
