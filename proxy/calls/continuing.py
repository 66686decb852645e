"""Check that a tenant's call goes on from a response of its own.

A provider keeps responses for all tenants under one account, and takes any of them to go on from:
its reply would tell what another tenant's conversation said.
"""

import asyncio
from typing import Final

from proxy.calls.asking import Arrived
from proxy.errors import BadRequest, NotContinued, NotKnownNow
from proxy.formats.base import ModelRequest
from proxy.formats.kept import all_fields, refers
from proxy.identity.call_memory import CallMemory, response_fingerprint
from proxy.intake import Intake
from proxy.lookup import Lookup
from proxy.upstreams.upstreams import shown
from store.link.responses import is_response
from store.tenants import own_digests, scoped

# A response of another worker is known once the ingester has stored it, which takes a moment.
WAIT_S: Final = 2.0
LOOK_S: Final = 0.25
PAUSE_S: Final = 0.1
# Names a conversation that the provider keeps; only keys of the default tenant can have made one.
CONVERSATION: Final = "conversation"
INPUT: Final = "input"
# By the first vLLM lets a client choose its response's id, also one that another response has; by
# the others further servers do (SGLang's is `rid`), or may.
CHOSEN_IDS: Final = ("request_id", "rid", "id", "response_id")
# No text that PostgreSQL keeps has it, and it takes none in a question.
NUL: Final = "\x00"


async def check_continued(
    arrived: Arrived, stitches: CallMemory, lookup: Lookup, intake: Intake
) -> None:
    """Check that the response that a call names to go on from is its tenant's.

    Not for calls of the default tenant: the provider's account is its own, with responses that no
    proxy has seen.

    Raises:
        NotContinued: no response of the tenant has this id.
        NotKnownNow: the database does not say, and this worker does not know.
        BadRequest: the call chooses its response's id, by which it could make another's its own.
    """
    tenant = arrived.exchange.tenant
    turns = arrived.format.turns
    if turns.continued_by_id:
        await _check_named(arrived, intake)
    previous = turns.continues(arrived.request.fields)
    if previous is None:
        return
    if NUL in previous:
        raise _unknown(previous, is_known=True)
    [digest] = own_digests(tenant, [response_fingerprint(previous)])
    name, dialect = scoped(tenant, previous), arrived.format.name
    clock = asyncio.get_running_loop().time
    deadline = clock() + WAIT_S
    while not stitches.knows(digest):
        known = await lookup.ask(lambda one: is_response(one, name, dialect), within_s=LOOK_S)
        if known:
            return
        if clock() >= deadline:
            raise _unknown(previous, is_known=known is not None)
        await asyncio.sleep(PAUSE_S)


async def _check_named(arrived: Arrived, intake: Intake) -> None:
    """Check that a call names no conversation or item that is kept, nor chooses its own name.

    Raises:
        NotContinued: it names what the provider keeps.
        BadRequest: it chooses its response's id.
    """
    fields = arrived.request.fields
    if fields.get(CONVERSATION):
        raise NotContinued(
            "Conversations are kept for all tenants under one account, and none of them is yours: "
            "send the conversation itself",
            param=CONVERSATION,
            code="conversation_not_found",
        )
    if await _refers(arrived, intake):
        raise NotContinued(
            "Items that the provider keeps are kept for all tenants under one account, and it is "
            "not known whose they are: send the items themselves, thoughts as the "
            "`encrypted_content` that `include` asks for",
            param=INPUT,
            code="item_reference_not_found",
        )
    chosen = next((one for one in CHOSEN_IDS if fields.get(one) is not None), None)
    if chosen is not None:
        raise BadRequest(
            f"{chosen} would be the response's id, and another tenant's response may have it: "
            "leave it out, and the model server chooses one",
            param=chosen,
            code="response_id_not_chosen",
        )


async def _refers(arrived: Arrived, intake: Intake) -> bool:
    """Return whether a request's items only name what the provider keeps."""
    if arrived.takes_long:
        return await intake.beside(_says_so, arrived.request)
    return _says_so(arrived.request)


def _says_so(request: ModelRequest) -> bool:
    return refers(all_fields(request).get(INPUT))


def _unknown(previous: str, *, is_known: bool) -> NotContinued | NotKnownNow:
    if is_known:
        return NotContinued(
            f"There is no response {shown(previous)!r} to go on from: send the conversation "
            "itself, or the id of a response that you got",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return NotKnownNow(
        f"It is not known now whether response {shown(previous)!r} is yours, as the database does "
        "not answer: send the request again, or the conversation itself",
        param="previous_response_id",
    )
