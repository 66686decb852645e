"""Show updates, evaluations and the recipe in the experiment trackers that accelerate knows.

Trackers may wait for a network. They run in a thread of their own, so that no update waits for
them. A tracker's failure is logged once, and the tracker is tried again with the next figures.
"""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from trainer.errors import TrainerError
from trainer.updates.plan import LeftOut

log = structlog.get_logger()

# The name of the project or experiment, and of the folder of trackers that write files.
PROJECT: Final = "pawl"
# At most this many items wait for the trackers; further items are dropped.
MOST_WAITING: Final = 256
# Seconds that the trainer waits for its trackers at its end.
END_S: Final = 10.0

# An update's metrics that list single episodes, calls and versions; they are not tracked.
BY_ID: Final = frozenset(LeftOut.__struct_fields__)

Figures = Mapping[str, Any]


class Trackers:
    """Send figures to the experiment trackers of one process; without trackers do nothing."""

    def __init__(self, names: Sequence[str], folder: Path, recipes: Mapping[str, Any]) -> None:
        """Begin a run in each named tracker, with the recipe (JSON) of each policy.

        Trackers that write files do so in `folder`.

        Raises:
            TrainerError: a name is unknown, or its package is not installed.
        """
        self._waiting: queue.Queue[tuple[Figures, int] | None] = queue.Queue(MOST_WAITING)
        # The newest version of each policy: a tracker's step must never become smaller.
        self._newest: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        if names:
            made = _make_trackers(names, folder)
            config = dict(flatten(recipes))
            # A tracker that hangs must not keep the process from its end.
            self._thread = threading.Thread(target=self._run, args=(made, config), daemon=True)
            self._thread.start()

    @property
    def is_tracking(self) -> bool:
        """Return whether there is any tracker."""
        return self._thread is not None

    def log(self, policy: str, figures: Figures, version: int | None = None) -> None:
        """Track the numbers among `figures` of a policy; skip other values.

        `version` is the new version that the figures are about, if any.
        """
        if version is not None:
            self._newest[policy] = version
        if self._thread is None:
            return
        numbers = {
            f"{policy}/{name}": value
            for name, value in flatten({key: figures[key] for key in figures.keys() - BY_ID})
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        try:
            self._waiting.put_nowait((numbers, sum(self._newest.values())))
        except queue.Full:
            log.warning("figures_not_tracked", policy=policy, reason="the trackers are too slow")

    def close(self) -> None:
        """End the trackers' runs; figures not sent within `END_S` seconds are lost."""
        if self._thread is None:
            return
        try:
            self._waiting.put(None, timeout=END_S)
        except queue.Full:
            return
        self._thread.join(END_S)

    def _run(self, trackers: Sequence[Any], config: Figures) -> None:
        """Send waiting figures to all trackers, in one thread because some trackers need that."""
        working = [_LazyTracker(tracker, config) for tracker in trackers]
        while (item := self._waiting.get()) is not None:
            for tracker in working:
                tracker.log(*item)
        for tracker in working:
            tracker.finish()


class _LazyTracker:
    """Start a tracker at its first figures; of several failures in a row log only the first."""

    def __init__(self, tracker: Any, config: Figures) -> None:
        self._tracker = tracker
        self._config = config
        self._has_begun = False
        self._fails = False

    def log(self, figures: Figures, step: int) -> None:
        try:
            if not self._has_begun:
                self._tracker.start()
                self._tracker.store_init_configuration(dict(self._config))
                self._has_begun = True
            self._tracker.log(dict(figures), step=step)
        # Whatever a tracker's library raises, training goes on.
        except Exception as error:
            self._log_failure(error)
        else:
            self._fails = False

    def finish(self) -> None:
        try:
            if self._has_begun:
                self._tracker.finish()
        except Exception as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        if not self._fails:
            why = f"{type(error).__name__}: {error}"[:500]
            log.warning("tracker_failed", tracker=self._tracker.name, reason=why)
        self._fails = True


def _make_trackers(names: Sequence[str], folder: Path) -> list[Any]:
    # Local, because these import torch and not every trainer has trackers.
    from accelerate import tracking
    from accelerate.utils import LoggerType

    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    made = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise TrainerError(f"PAWL_TRACKERS: {name!r} is not known: use {', '.join(known)}")
        if name in LoggerType.list() and name not in installed:
            raise TrainerError(
                f"PAWL_TRACKERS: the package of {name!r} is not installed: run `pip install {name}`"
                " in the trainer's environment, or leave the name out"
            )
        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        where = (str(folder),) if kind.requires_logging_directory else ()
        made.append(kind(PROJECT, *where))
    return made


def flatten(values: Figures, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each entry of nested tables; lists become JSON, None is skipped."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        elif isinstance(value, str | int | float):
            yield f"{prefix}{name}", value
        elif value is not None:
            yield f"{prefix}{name}", msgspec.json.encode(value).decode()
