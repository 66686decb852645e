"""Read recorded replies from an upstream: whole ones, and what follows a stream's last event."""

from collections.abc import AsyncIterator
from typing import Final

import structlog

from proxy.calls.capture import Tape
from proxy.errors import ReplyTooLarge, ReplyTorn
from proxy.formats.base import StreamTranscript
from proxy.http.client import Torn
from proxy.http.exchange import Exchange
from proxy.upstreams.model_server import Reply

log = structlog.get_logger()

EVENT_STREAM: Final = b"text/event-stream"


def comes_in_events(reply: Reply) -> bool:
    """Return whether a reply is a stream of events that can be read as one."""
    kind = reply.header(b"content-type") or b""
    return kind.startswith(EVENT_STREAM) and not reply.header(b"content-encoding")


async def take_whole(reply: Reply, limit: int, tape: Tape, call: str) -> bytes:
    """Return a reply's body, after recording on the tape what came of it, whole or torn.

    Raises:
        ReplyTorn: the reply broke off.
        ReplyTooLarge: it is longer than `limit` bytes.
    """
    try:
        body = await reply.read(limit)
    except Torn as error:
        log.warning("reply_torn", call=call, reason=str(error))
        tape.keep(reply.unread())
        raise ReplyTorn(
            f"The model server's reply broke off before its end: {error}. "
            "Nothing of it was passed on",
            code="upstream_broke",
        ) from error
    if body is None:
        raise ReplyTooLarge(
            "The model server's reply, which comes in one piece, is larger than this proxy "
            "holds to record it; PAWL_MAX_REPLY_MB sets how much, and a stream has no limit"
        )
    tape.keep(body)
    return body


async def pass_rest(
    exchange: Exchange,
    pieces: AsyncIterator[bytes],
    transcript: StreamTranscript,
    call: str,
) -> None:
    """Pass on what follows a reply's last event, until the upstream closes its body.

    The client has that event and the record is made, so the rest is not recorded.
    """
    exchange.write(transcript.release())
    try:
        async for chunk in pieces:
            exchange.write(transcript.feed(chunk))
            await exchange.drained()
    except Torn as error:
        log.info("stream_torn_after_its_end", call=call, reason=str(error))
