"""Logging of all processes with structlog: readable on a terminal, JSON lines elsewhere."""

import asyncio
import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, BinaryIO, Final, cast

import msgspec
import structlog
from pydantic import ValidationError
from pydantic_settings import SettingsError

from store.settings import Settings

_encode = msgspec.json.Encoder(enc_hook=str).encode
# In a longer line each text is cut: many texts come from clients and upstreams, which may send
# megabytes.
MOST_LINE_BYTES: Final = 2048
MOST_CHARS: Final = 256
# A traceback gets more room: its beginning shows where an error happened, its end which one.
MOST_TRACE_CHARS: Final = 8192
TRACE: Final = "exception"
MOST_ITEMS: Final = 100
MOST_DEPTH: Final = 4


def shortened(event: Mapping[str, object]) -> dict[str, object]:
    """Return a log line's fields, with long texts cut in the middle and long lists at the end."""
    return {
        _cut(name): _shorten(value, MOST_TRACE_CHARS if name == TRACE else MOST_CHARS, MOST_DEPTH)
        for name, value in event.items()
    }


def _shorten(value: object, most: int, depth: int) -> object:
    if isinstance(value, str):
        return _cut(value, most)
    if value is None or isinstance(value, bool | int | float | datetime):
        return value
    if isinstance(value, Mapping) and depth:
        pairs = islice(value.items(), MOST_ITEMS)
        return {_cut(str(name)): _shorten(item, most, depth - 1) for name, item in pairs}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [_shorten(item, most, depth - 1) for item in islice(value, MOST_ITEMS)]
    return _cut(str(value), most)


def _cut(text: str, most: int = MOST_CHARS) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}… {len(text) - 2 * half} characters …{text[-half:]}"


def _line_of(event: Mapping[str, object]) -> bytes:
    line = _encode(event)
    return line if len(line) <= MOST_LINE_BYTES else _encode(shortened(event))


def _render_line(logger: object, level: str, event: structlog.typing.EventDict) -> bytes:
    """Render a log line as JSON, in one step: structlog's usual processors are slower."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, level, event)
    event["level"] = level
    event["timestamp"] = datetime.now(UTC)
    return _line_of(event)


class LineLogger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc]
    """A logger whose `debug` skips structlog's processing, which takes longer than the writing.

    Each model call logs a line of this level. The lines are the same as structlog's if
    `_render_line` is the only processor.
    """

    def debug(self, event: str, *args: object, **fields: object) -> None:
        if args or self._context:
            super().debug(event, *args, **fields)
        else:
            fields["event"] = event
            self._logger.debug(_render_line(self._logger, "debug", fields))


class NeverRaisingFile:
    """A file whose writes never raise: a full disk must not stop a call.

    The number of lines that could not be written is logged (`log_lines_lost`) with the next write
    that succeeds.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lost = 0
        self._torn = False

    def write(self, lines: bytes) -> int:
        """Try to write whole lines; return the length of `lines`, even if writing failed."""
        prefix = b""
        if self._torn:
            # The last write broke off within a line: end that line first.
            prefix += b"\n"
        if self._lost:
            prefix += _encode({"event": "log_lines_lost", "lines": self._lost, "level": "error"})
            prefix += b"\n"
        rest = memoryview(prefix + lines)
        try:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError:
            # The next write that succeeds reports the loss: it can be reported nowhere else.
            self._torn = len(rest) < len(prefix) + len(lines)
            self._lost += bytes(rest).count(b"\n") if self._torn else lines.count(b"\n")
        else:
            self._lost, self._torn = 0, False
        return len(lines)

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""


class BufferedLogger:
    """Buffers lines, and writes them a few times a second.

    A write for each line would slow calls down. Warnings and errors are written at once, after the
    buffered lines.
    """

    MOST_BYTES = 64 * 1024
    EVERY_S = 0.2

    def __init__(self, file: NeverRaisingFile) -> None:
        """Store the file, and register a flush at the process's exit."""
        self._file = file
        self._lines: list[bytes] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        atexit.register(self.flush)

    def info(self, line: bytes) -> None:
        """Buffer a line, and schedule a write."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes > self.MOST_BYTES:
            self.flush()
        elif self._timer is None:
            # Without an event loop in this thread, a later line or the process's exit writes it.
            with suppress(RuntimeError):
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.EVERY_S, self.flush)

    def error(self, line: bytes) -> None:
        """Write a line at once, after the buffered ones."""
        self._lines.append(line)
        self.flush()

    msg = debug = info
    warning = warn = critical = fatal = exception = error

    def flush(self) -> None:
        """Write the buffered lines."""
        self._timer = None
        lines, self._lines, self._bytes = self._lines, [], 0
        if lines:
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()


class LibraryLines(logging.Handler):
    """Forwards each log record of a library to our log, as one shortened line.

    Records may quote clients: aiohttp quotes bytes that it could not read.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of level ERROR or above as an error, any other as a warning."""
        log = structlog.get_logger()
        write = log.error if record.levelno >= logging.ERROR else log.warning
        try:
            text = record.getMessage()
            write("library", library=record.name, said=text, exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


def _level() -> int:
    """Return the level of `PAWL_LOG_LEVEL`, or the default level if settings cannot be read.

    The command that needs the settings reports the error.
    """
    try:
        name = Settings().log_level
    except (ValidationError, SettingsError):
        name = Settings.model_fields["log_level"].default
    return logging.getLevelNamesMapping()[name.upper()]


def configure_logging(*, buffered: bool = False) -> None:
    """Configure structlog, also for the records of libraries; each process calls this once.

    Lines below `PAWL_LOG_LEVEL` are left out. With `buffered`, lines are written a few times a
    second, unless standard error is a terminal.
    """
    level = _level()
    factory: Callable[..., structlog.typing.WrappedLogger]
    wrapper: type[Any] = structlog.make_filtering_bound_logger(level)
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if sys.stderr.isatty():
        processors += [lambda *given: shortened(given[2]), structlog.dev.ConsoleRenderer()]
        factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        processors.append(structlog.processors.JSONRenderer(lambda event, **_: _line_of(event)))
        file = NeverRaisingFile(sys.stderr.fileno())
        # The cast is safe: the logger only calls `write` and `flush`.
        factory = structlog.BytesLoggerFactory(cast(BinaryIO, file))
        if buffered:
            processors = [_render_line]
            if level == logging.DEBUG:
                wrapper = LineLogger
            logger = BufferedLogger(file)

            def factory(*_: object) -> BufferedLogger:
                return logger

    structlog.configure(
        processors=processors,
        wrapper_class=wrapper,
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryLines()])
