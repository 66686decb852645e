"""One log for all processes: structlog, readable on a terminal, JSON elsewhere."""

import asyncio
import atexit
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import BinaryIO

import msgspec
import structlog


def _to_json(event: object, **_: object) -> bytes:
    return msgspec.json.encode(event, enc_hook=str)


def _level_and_time(
    _logger: object, level: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """What the usual processors add, in one step; the renderer writes the time."""
    event["level"] = level
    event["timestamp"] = datetime.now(UTC)
    return event


class GatheringLogger:
    """Writes lines together, a few times a second: a write a line costs a call too much.

    What tells of trouble is written at once, and what came before it with it.
    """

    MOST_BYTES = 64 * 1024
    EVERY_S = 0.2

    def __init__(self, file: BinaryIO) -> None:
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
    renderer: structlog.typing.Processor
    factory: Callable[..., structlog.typing.WrappedLogger]
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
        factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        renderer = structlog.processors.JSONRenderer(_to_json)
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
        if gather:
            processors = [_level_and_time, structlog.processors.format_exc_info]
            logger = GatheringLogger(sys.stderr.buffer)

            def factory(*_: object) -> GatheringLogger:
                return logger

    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
