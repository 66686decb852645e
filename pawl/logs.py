"""One log for all processes: structlog, readable on a terminal, JSON elsewhere."""

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import BinaryIO, Final, cast

import msgspec
import structlog

_encode = msgspec.json.Encoder(enc_hook=str).encode
# A line no longer than this is written as it is. Of a longer one each text is cut: much of what
# is logged was said by clients and upstreams, who may say megabytes.
MOST_LINE_BYTES: Final = 2048
MOST_CHARS: Final = 256
# The end of a trace says what went wrong, its beginning where.
MOST_TRACE_CHARS: Final = 8192
TRACE: Final = "exception"
MOST_ITEMS: Final = 100
MOST_DEPTH: Final = 4


def shortened(event: Mapping[str, object]) -> dict[str, object]:
    """Return a line's fields, each text cut to what helps who reads it."""
    return {
        _cut(name): _short(value, MOST_TRACE_CHARS if name == TRACE else MOST_CHARS, MOST_DEPTH)
        for name, value in event.items()
    }


def _short(value: object, most: int, depth: int) -> object:
    if isinstance(value, str):
        return _cut(value, most)
    if value is None or isinstance(value, bool | int | float | datetime):
        return value
    if isinstance(value, Mapping) and depth:
        pairs = islice(value.items(), MOST_ITEMS)
        return {_cut(str(name)): _short(item, most, depth - 1) for name, item in pairs}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [_short(item, most, depth - 1) for item in islice(value, MOST_ITEMS)]
    return _cut(str(value), most)


def _cut(text: str, most: int = MOST_CHARS) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}… {len(text) - 2 * half} characters …{text[-half:]}"


def _line_of(event: Mapping[str, object]) -> bytes:
    line = _encode(event)
    return line if len(line) <= MOST_LINE_BYTES else _encode(shortened(event))


def _to_json(event: Mapping[str, object], **_: object) -> bytes:
    return _line_of(event)


def _short_fields(
    _: object, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return shortened(event)


def _line(logger: object, level: str, event: structlog.typing.EventDict) -> bytes:
    """What the usual processors and the renderer do, in one step."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, level, event)
    event["level"] = level
    event["timestamp"] = datetime.now(UTC)
    return _line_of(event)


class SureFile:
    """Writes to a descriptor; no failure of it reaches who logs: a log's disk may be full.

    What could not be written is counted, and told once there is room again.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lost = 0
        self._torn = False

    def write(self, lines: bytes) -> int:
        """Write whole lines, as far as it can be done; returns how many bytes were taken."""
        told = b""
        if self._torn:
            told += b"\n"
        if self._lost:
            told += _encode({"event": "log_lines_lost", "lines": self._lost, "level": "error"})
            told += b"\n"
        rest = memoryview(told + lines)
        try:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError:
            # Told when it can be; there is nowhere else to say it.
            self._torn = len(rest) < len(told) + len(lines)
            self._lost += bytes(rest).count(b"\n") if self._torn else lines.count(b"\n")
        else:
            self._lost, self._torn = 0, False
        return len(lines)

    def flush(self) -> None:
        """Do nothing: what was taken is written."""


class GatheringLogger:
    """Writes lines together, a few times a second: a write a line costs a call too much.

    What tells of trouble is written at once, and what came before it with it.
    """

    MOST_BYTES = 64 * 1024
    EVERY_S = 0.2

    def __init__(self, file: SureFile) -> None:
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
        processors += [_short_fields, structlog.dev.ConsoleRenderer()]
        factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        processors.append(structlog.processors.JSONRenderer(_to_json))
        file = SureFile(sys.stderr.fileno())
        # It takes anything that can be written to and flushed.
        factory = structlog.BytesLoggerFactory(cast(BinaryIO, file))
        if gather:
            processors = [_line]
            logger = GatheringLogger(file)

            def factory(*_: object) -> GatheringLogger:
                return logger

    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
