"""Show a rollout: a live table on a terminal, a line now and then elsewhere."""

import asyncio
import time
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pawl.rollout.running import Rollout

REFRESH_S: Final = 0.5
LINE_S: Final = 10.0
MAX_ERRORS: Final = 6


class Display:
    """Show a rollout."""

    def __init__(self, rollout: Rollout, console: Console) -> None:
        """Store what is shown, and where."""
        self._rollout = rollout
        self._figures = rollout.figures
        self._console = console
        self._started = time.monotonic()

    async def show(self) -> None:
        """Show the rollout until this is cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(LINE_S)
                words = [f"{name} {value}" for name, value in self._cells().items()]
                line = "  ".join([*words, self._rollout.trouble]).rstrip()
                self._console.print(line, highlight=False, soft_wrap=True)
        with Live(self._table(), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    live.update(self._table(), refresh=True)
            finally:
                live.update(self._table(), refresh=True)

    def _cells(self) -> dict[str, str]:
        reward = self._figures.reward
        return {
            "runs": f"{self._figures.runs}/{self._figures.planned}",
            "under way": str(self._rollout.under_way),
            "failed": str(self._figures.outcomes["failed"]),
            "reward": "–" if reward is None else f"{reward:.3f}",
            "seconds": f"{time.monotonic() - self._started:.0f}",
        }

    def _table(self) -> Group:
        head = Table(*self._cells(), box=None, header_style="dim")
        head.add_row(*self._cells().values())
        errors = [
            Text(f"{count:6}  {kind}", style="red")
            for kind, count in self._figures.errors.most_common(MAX_ERRORS)
        ]
        return Group(head, *errors, Text(self._rollout.trouble, style="yellow"))
