"""One log for all processes: structlog, readable on a terminal, JSON elsewhere."""

import asyncio
import atexit
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from typing import BinaryIO, cast

import msgspec
import structlog

_encode = msgspec.json.Encoder(enc_hook=str).encode


def _to_json(event: object, **_: object) -> bytes:
    return _encode(event)


def _line(logger: object, level: str, event: structlog.typing.EventDict) -> bytes:
    """What the usual processors and the renderer do, in one step."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, level, event)
    event["level"] = level
    event["timestamp"] = datetime.now(UTC)
    return _encode(event)


class SteadyFile:
    """A file of lines that may be on a full disk: a line is lost then, and nobody else's work.

    How many were lost is said as soon as lines can be written again.
    """

    def __init__(self, file: FileIO) -> None:
        """Write to `file`, which has no buffer: what is lost must not be in the way of the rest."""
        self._file = file
        self._lost = 0

    def write(self, data: bytes) -> int:
        """Write lines, if the disk takes them; never raises an `OSError`."""
        try:
            if self._lost:
                told = {"event": "log_lines_lost", "level": "error", "lines": self._lost}
                self._put(_encode(told | {"timestamp": datetime.now(UTC)}) + b"\n")
            self._put(data)
        except OSError:
            self._lost += data.count(b"\n")
        else:
            self._lost = 0
        return len(data)

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]

    def flush(self) -> None:
        """Nothing is kept here."""


class GatheringLogger:
    """Writes lines together, a few times a second: a write a line costs a call too much.

    What tells of trouble is written at once, and what came before it with it.
    """

    MOST_BYTES = 64 * 1024
    EVERY_S = 0.2

    def __init__(self, file: SteadyFile) -> None:
        self._file = file
        self._lines: list[bytes] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        atexit.register(self.flush)

    def info(self, line: bytes) -> None:
        """Keep a line for the next write."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes > self.MOST_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = self._schedule()

    def error(self, line: bytes) -> None:
        """Write a line now."""
        self._lines.append(line)
        self.flush()

    msg = debug = info
    warning = warn = critical = fatal = exception = error

    def _schedule(self) -> asyncio.TimerHandle | None:
        try:
            return asyncio.get_running_loop().call_later(self.EVERY_S, self.flush)
        except RuntimeError:
            # Another thread, or no loop yet: the next line or the end writes it.
            return None

    def flush(self) -> None:
        """Write what was kept."""
        self._timer = None
        lines, self._lines, self._bytes = self._lines, [], 0
        if lines:
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()


def configure_logging(*, gather: bool = False) -> None:
    """Set structlog up; called once, by the command that was started.

    `gather`: for a process that writes a line a call.
    """
    factory: Callable[..., structlog.typing.WrappedLogger]
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if sys.stderr.isatty():
        processors.append(structlog.dev.ConsoleRenderer())
        factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        processors.append(structlog.processors.JSONRenderer(_to_json))
        steady = SteadyFile(FileIO(sys.stderr.fileno(), "wb", closefd=False))
        factory = structlog.BytesLoggerFactory(cast(BinaryIO, steady))
        if gather:
            processors = [_line]
            logger = GatheringLogger(steady)

            def factory(*_: object) -> GatheringLogger:
                return logger

    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
