"""Read a call's request, beside the event loop if that takes long."""

import msgspec

from proxy.formats.base import ModelRequest, Turns
from proxy.formats.conversation import Conversation
from proxy.formats.requests import read_request
from proxy.http.exchange import Exchange
from proxy.intake.budget import Claim
from proxy.intake.intake import Intake


class Read(msgspec.Struct, frozen=True):
    """Hold a parsed request; for one that takes long, its conversation was read as well."""

    asked: ModelRequest
    conversation: Conversation | None = None
    # Why it could not be read, where that was not foreseen: the call is answered and recorded.
    failure: Exception | None = None

    @property
    def takes_long(self) -> bool:
        """Return whether further work on the request must run beside the event loop."""
        return self.conversation is not None


async def take_request(intake: Intake, exchange: Exchange, claim: Claim, turns: Turns) -> Read:
    """Read and parse the request of a call, whose format has such `turns`.

    Raises:
        TooLarge, BadRequest, Overloaded, ClientGone: as `Intake.read` does.
    """
    taken = intake.read_arrived(exchange, claim)
    body, long = await intake.read(exchange, claim) if taken is None else taken
    try:
        if long:
            return await intake.beside(_read_all, body, turns)
        return Read(read_request(body, checked=True))
    except Exception as failure:
        return Read(ModelRequest(body=body), failure=failure)


def _read_all(body: bytes, turns: Turns) -> Read:
    request = read_request(body, checked=True)
    return Read(request, turns.read(request.fields))
