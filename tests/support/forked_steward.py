"""Run a steward again and again, in test_killed_stewards.py: as soon as one was killed, the next.

Each is a child that is forked once all is imported, which takes longer than what it does. The
number of each process is written to standard output. One that ends by itself ends all.
"""

import asyncio
import os
import signal
import sys

from pawl.processes import die_with_parent
from pawl.settings import StewardSettings, read_settings
from pawl.steward.run import steward


def main() -> None:
    while True:
        child = os.fork()
        if not child:
            die_with_parent()
            # What it logs goes elsewhere than the numbers.
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            asyncio.run(steward(read_settings(StewardSettings)))
            os._exit(1)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"a steward ended by itself: {status}")


if __name__ == "__main__":
    main()
