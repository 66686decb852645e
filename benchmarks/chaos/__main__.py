"""Kill processes, take the database away, and watch memory, all under load.

`--target proxy`: a model server that answers at once, an embedded PostgreSQL and `pawl proxy`
are started; one of four things is done (`--kills`, `--outage`, `--calls`, `--feedback`), and what
the clients saw is compared with what is stored. Between kills the spool's disk, a small one of its
own, is full or gives I/O errors for a moment, and one record in 200 is poison; `--plain` leaves
that out, and needs neither root nor a C compiler. With `--full` the disk also stays full for so
many seconds, while workers, ingester and supervisor are killed.

`--target trainer`: a ledger of scored episodes is trained twice, once by a `pawl trainer` that
is left alone and once by one that is killed (`--kills`), at boundaries of its steps and at
random; what became of every episode and every version's bytes are compared. Two kills in five are
of the model server, which has no adapters when it is back, and of `pawl steward`, which gives them
back; callers ask for every version through a `pawl proxy` meanwhile. `--plain` kills trainers
alone; `--vllm` kills a real vLLM, which takes half a minute to start.

`--target canaries`: live episodes decide about versions (`[gate]`), while steward, trainer, the
proxy's processes and the model server are killed (`--kills`); each change of a version's state must
have been made once, with its reason, and no episode be without an arm.

Ends with status 1 where a promise is broken.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.canaries.run import canary_kills
from benchmarks.chaos.faults import CannotInjectFaults
from benchmarks.chaos.feedback import feedback
from benchmarks.chaos.kills import kills
from benchmarks.chaos.memory import memory
from benchmarks.chaos.outage import outage
from benchmarks.chaos.stand import standing
from benchmarks.chaos.trainer.cast import BASE, CASTS
from benchmarks.chaos.trainer.kills import trainer_kills

# Memory that is flat may still wander by pages: so many bytes a call are no growth.
FLAT: Final = 50.0
# Of the members of a list so many are shown.
TOLD: Final = 10


def main() -> None:
    """Parse, run, print."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        of = TARGETS[options.target]
        try:
            by_name = of(options, Path(folder))
        except CannotInjectFaults as error:
            raise SystemExit(str(error)) from error
    console, broken = Console(stderr=options.json), []
    for name, found in by_name.items():
        of_it = broken_promises(found)
        console.print(_table(f"{options.target}: {name}", found, of_it))
        broken += of_it
    if options.json:
        print(json.dumps(by_name | {"broken": broken}))
    sys.exit(1 if broken else 0)


def _of_the_proxy(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    faults = not (options.calls or options.outage or options.feedback or options.plain)
    if options.full and not faults:
        raise SystemExit("--full fills the disk: give it --kills, and leave out --plain")
    with standing(folder, options.workers, faults=faults) as stand:
        if options.calls:
            return {"memory": asyncio.run(memory(stand, options.calls))}
        if options.feedback:
            return {"feedback": asyncio.run(feedback(stand, options.feedback, options.seed))}
        if options.outage:
            return {"outage": asyncio.run(outage(stand, options.outage))}
        return {"kills": asyncio.run(kills(stand, options.kills, options.seed, options.full))}


def _of_the_trainer(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    if options.calls or options.outage or options.full or options.feedback:
        raise SystemExit("--target trainer is killed, and nothing else: give it --kills")
    found = trainer_kills(
        folder,
        options.kills,
        options.seed,
        learner=options.learner,
        baseline=options.baseline,
        policies=options.policies,
        shared=options.shared,
        beside=None if options.plain else "vllm" if options.vllm else "computing",
    )
    if options.policies > 1:
        return found
    of_the_rest = {"beside": found["beside"]} if "beside" in found else {}
    return {"kills": found[BASE]} | of_the_rest


def _of_canaries(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    if options.calls or options.outage or options.full or options.feedback:
        raise SystemExit("--target canaries is about kills, and nothing else: give it --kills")
    return canary_kills(folder, options.kills, options.seed)


TARGETS: Final = {"proxy": _of_the_proxy, "trainer": _of_the_trainer, "canaries": _of_canaries}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", choices=list(TARGETS), default="proxy")
    parser.add_argument("--workers", type=int, default=2, help="of the proxy (2)")
    parser.add_argument(
        "--learner", choices=["grpo", "ppo", "sft"], default="grpo", help="of the trainer (grpo)"
    )
    parser.add_argument(
        "--baseline",
        choices=["group", "leave_one_out", "moving", "none"],
        default="group",
        help="of the trainer with grpo (group)",
    )
    parser.add_argument(
        "--policies",
        type=int,
        choices=sorted(CASTS),
        default=1,
        help="in training, each killed its share of --kills (1)",
    )
    parser.add_argument(
        "--shared", action="store_true", help="one trainer of all --policies is killed"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--plain",
        action="store_true",
        help="of the proxy: no faults of the disk; of the trainer: nothing else is killed",
    )
    others.add_argument(
        "--vllm", action="store_true", help="the model server beside the trainer is a real vLLM"
    )
    parser.add_argument(
        "--full",
        type=float,
        default=0.0,
        help="of the proxy: kill also while the disk is full, for so many seconds (0)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims (1)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--kills", type=int, default=100, help="kill -9 so many times (100)")
    what.add_argument("--outage", type=float, help="take the database away for so many seconds")
    what.add_argument("--calls", type=int, help="watch memory over so many calls")
    what.add_argument("--feedback", type=int, help="kill while so many statements are sent")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser.parse_args()


def broken_promises(found: dict[str, Any]) -> list[str]:
    """Return which of the promises that a run is about it broke; empty if none."""
    nothing = (
        *("missing", "twice", "failed", "failed_otherwise", "scrapes_off", "scrapes_failed"),
        *("lost", "spent_otherwise", "states_differ", "files_differ", "by_themselves"),
        *("ended_by_itself", "stalled", "dropped_uncounted", "poison_not_dead", "of_untrained"),
        *("not_loaded", "not_found", "not_aside", "returns_differ", "scores_differ"),
        *("scores_missing", "without_arm", "wrong_events"),
    )
    broken = [f"{name}: {_counted(found[name])}" for name in nothing if found.get(name)]
    if found.get("drain_s", 0.0) is None:
        broken.append("the spool was not drained in time")
    for process, grows in found.get("bytes_a_call", {}).items():
        if grows > FLAT:
            broken.append(f"{process} grows by {grows} bytes a call")
    return broken


def _table(name: str, found: dict[str, Any], broken: list[str]) -> Table:
    table = Table("", "", title=name, caption="; ".join(broken) or "all promises held")
    for key, value in found.items():
        if isinstance(value, list):
            table.add_row(key, _counted(value) or "none")
        else:
            table.add_row(key, _said(value))
    return table


def _counted(value: Any) -> str:
    """Count the members of a list; return anything else as it is."""
    if not isinstance(value, list):
        return _said(value)
    times = Counter(map(_said, value))
    told = [f"{count} × {said}" if count > 1 else said for said, count in times.most_common(TOLD)]
    return "\n".join([*told, *([f"and {len(times) - TOLD} more"] if len(times) > TOLD else [])])


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {held}" for key, held in value.items()) or "none"
    return str(value)


if __name__ == "__main__":
    main()
