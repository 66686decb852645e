"""Run `python -m benchmarks.rollout.journal`: what a long journal costs that is gone on with.

A journal of runs with long outputs is written, as `pawl rollout` does it, all told but for the
last; a process of its own then resumes it, and says how much memory that took at the most.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pawl.rollout.journal import Begun, Finished, Key, Line, Plan, Told, encoded
from pawl.rollout.journal_file import JournalFile

SAMPLES = 8
PLAN = Plan(tasks="", samples=SAMPLES, agent="", judge="", split=None, policies=("",))


def written(path: Path, size: int, output: int) -> int:
    """Write a journal of so many bytes, of runs with outputs of so many; return their number."""
    runs = 0
    with path.open("wb") as file:
        file.write(encoded([PLAN]))
        while file.tell() < size:
            episode = f"rollout-0123456789ab-{runs}"
            statement = {"metric": "reward", "value": float(runs % 2), "episode": episode}
            key = Key("", f"task-{runs // SAMPLES}", runs % SAMPLES)
            lines: list[Line] = [
                Begun(episode=episode, key=key),
                Finished(
                    episode=episode, outcome="done", output="x" * output, statements=(statement,)
                ),
                Told(episode=episode),
            ]
            runs += 1
            file.write(encoded(lines if file.tell() < size else lines[:2]))
    return runs


def resumed(path: Path) -> dict[str, float]:
    """Open a journal as `pawl rollout` does; return what that took of this process."""
    before, started = _peak_mb(), time.monotonic()
    journal = JournalFile(path)
    journal.plan()
    past = journal.open_plan(PLAN)
    seconds = round(time.monotonic() - started, 1)
    return {"runs": len(past.settled), "added_mb": round(_peak_mb() - before), "seconds": seconds}


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Write a journal, and resume it in another process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--output-kb", type=int, default=10)
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    if arguments.resume is not None:
        print(json.dumps(resumed(arguments.resume)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        written(path, arguments.mb * 2**20, arguments.output_kb * 2**10)
        command = [sys.executable, "-m", "benchmarks.rollout.journal", "--resume", str(path)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
