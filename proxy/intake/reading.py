"""Reads a call's request, beside the event loop where that takes long."""

from typing import NamedTuple

from proxy.dialects.base import ModelRequest, read_request
from proxy.http.exchange import Exchange
from proxy.identity.conversation import Conversation, read_conversation
from proxy.intake.budget import Claim
from proxy.intake.intake import Intake


class Read(NamedTuple):
    """A request that was parsed; with its conversation where reading that takes long."""

    asked: ModelRequest
    conversation: Conversation | None = None
    # Why it could not be read, where that was not foreseen: the call is answered and recorded.
    failure: Exception | None = None

    @property
    def takes_long(self) -> bool:
        """Whether more work on it would hold up other calls."""
        return self.conversation is not None


async def take_request(intake: Intake, exchange: Exchange, claim: Claim) -> Read:
    """The request of a call; see `Intake.read` for what is refused."""
    body, long = await intake.read(exchange, claim)
    try:
        if long:
            return await intake.beside(_read_all, body)
        return Read(read_request(body, checked=True))
    except Exception as failure:
        return Read(ModelRequest(body=body), failure=failure)


def _read_all(body: bytes) -> Read:
    asked = read_request(body, checked=True)
    return Read(asked, read_conversation(asked.fields))
