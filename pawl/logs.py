"""One log for all processes: structlog, readable on a terminal, JSON elsewhere."""

import logging
import sys
from collections.abc import Callable

import msgspec
import structlog


def _to_json(event: object, **_: object) -> bytes:
    return msgspec.json.encode(event, enc_hook=str)


def configure_logging() -> None:
    """Set structlog up; called once, by the command that was started."""
    renderer: structlog.typing.Processor
    factory: Callable[..., structlog.typing.WrappedLogger]
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
        factory = structlog.PrintLoggerFactory(sys.stderr)
    else:
        renderer = structlog.processors.JSONRenderer(_to_json)
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
