"""`pawl rollout` on a real terminal: a table there, and the summary where the output goes."""

import asyncio
import json
import os
import re
import termios

from tests.integration.pawl.rollout.test_rollout import COMMAND, fake, runner
from tests.support.rollouts import Runner

__all__ = ["fake", "runner"]

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_to_its_end(terminal: int) -> str:
    """All that is written to a terminal until no program has it any more."""
    pieces = []
    while True:
        try:
            pieces.append(os.read(terminal, 65536))
        except OSError:  # what Linux says then
            return b"".join(pieces).decode()


async def test_a_terminal_gets_a_table_and_the_output_the_summary(runner: Runner) -> None:
    runner.write([{"id": "t0", "a": "echo hello"}, {"id": "t1", "a": "x", "do": "exit"}])
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 90))
    process = await runner.start(
        *(*COMMAND, "-n", "2", "-k", "2", "--answer", "a"), terminal=theirs, TERM="xterm-256color"
    )
    os.close(theirs)
    try:
        shown = await asyncio.wait_for(asyncio.to_thread(read_to_its_end, ours), 120)
    finally:
        os.close(ours)
    out, _ = await process.communicate()
    assert process.returncode == 1, shown
    assert json.loads(out)["failed"] == 2
    assert "\x1b[?25l" in shown  # the cursor is hidden, as only a terminal has one
    last = CONTROL.sub("", shown[shown.rindex("under way") :])
    lines = [line.split() for line in last.splitlines()]
    assert ["4/4", "0", "2", "1.000"] in [words[:4] for words in lines]
    assert ["2", "exit", "status", "3"] in lines
