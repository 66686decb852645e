"""Show a rollout: a live table on a terminal, a line now and then elsewhere."""

import asyncio
import time
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pawl.rollout.desk import Desk
from pawl.rollout.figures import Figures, Tally
from pawl.rollout.proxy_view import ProxyView
from pawl.rollout.running import Rollout

REFRESH_S: Final = 0.5
LINE_S: Final = 10.0
MOST_ERRORS: Final = 6


class Display:
    """Show one rollout on standard error while it runs."""

    def __init__(self, rollout: Rollout, view: ProxyView, desk: Desk, console: Console) -> None:
        """Store what is shown, and where."""
        self._rollout = rollout
        self._view = view
        self._desk = desk
        self._console = console
        self._started = time.monotonic()

    async def show(self) -> None:
        """Show the rollout until this is cancelled."""
        if not self._console.is_terminal:
            while True:
                await asyncio.sleep(LINE_S)
                self._console.print(self.line(), highlight=False, soft_wrap=True)
        with Live(self._render(), console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    live.update(self._render(), refresh=True)
            finally:
                live.update(self._render(), refresh=True)

    def line(self) -> str:
        """Return how far the rollout is, in one line."""
        figures = self._rollout.figures
        words = [
            f"{time.monotonic() - self._started:6.1f} s",
            f"{figures.all.runs}/{figures.planned} runs",
            f"{figures.all.failed} failed",
            f"reward {_number(figures.all.reward)}",
        ]
        return "  ".join(words + ([trouble] if (trouble := self._trouble()) else []))

    def _trouble(self) -> str:
        if self._desk.away is not None:
            return f"feedback waits: {self._desk.away}"
        if self._rollout.stopping:
            return f"stopping: {self._rollout.under_way} runs under way (Ctrl-C gives them up)"
        return ""

    def _render(self) -> Group:
        figures = self._rollout.figures
        parts: list[Table | Text] = [self._head(figures), _wave_table(figures)]
        if figures.errors:
            parts.append(_error_table(figures))
        if trouble := self._trouble():
            parts.append(Text(trouble, style="yellow"))
        return Group(*parts)

    def _head(self, figures: Figures) -> Table:
        a_second = self._view.calls_a_second
        cells = {
            "runs": f"{figures.all.runs}/{figures.planned}",
            "under way": str(self._rollout.under_way),
            "success": _share(figures.all.success),
            "reward": _number(figures.all.reward),
            "calls/s": "–" if a_second is None else f"{a_second:.1f}",
            "serving": ", ".join(self._view.serving.values()) or "–",
            "seconds": f"{time.monotonic() - self._started:.0f}",
        }
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*[Text(name, style="dim") for name in cells])
        grid.add_row(*[Text(value, style="bold") for value in cells.values()])
        return grid


def _wave_table(figures: Figures) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("wave", "version", "runs", "success", "reward", ""):
        table.add_column(name, justify="right" if name else "left")
    for number, wave in enumerate(figures.waves, start=1):
        table.add_row(
            str(number),
            Text(", ".join(wave.versions[-2:]) or "–"),
            str(wave.runs),
            _share(wave.success),
            _number(wave.reward),
            _bar(wave),
        )
    return table


def _bar(wave: Tally) -> ProgressBar | Text:
    reward = wave.reward
    if reward is None or not 0 <= reward <= 1:
        return Text()
    return ProgressBar(total=1.0, completed=reward, width=24)


def _error_table(figures: Figures) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("errors", justify="right")
    table.add_column("kind")
    for kind, count in figures.errors.most_common(MOST_ERRORS):
        table.add_row(str(count), Text(kind))
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
