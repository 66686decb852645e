"""List the headers and fields that the proxy reads, and the headers that it adds to a reply."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from proxy.identity import names
from proxy.tools.tool_status import MAX_TEXT, PARAMETERS
from store.records import TOOL_STATUSES

ANY_TEXT: Final[Mapping[str, object]] = {"type": "string"}
# In ASCII alone, as clients encode other characters in different ways; spaces around a value are
# none of it (RFC 9110 §5.5).
PRINTABLE: Final[Mapping[str, object]] = {
    "type": "string",
    "maxLength": names.MAX_LENGTH,
    "pattern": "^[!-~]([ -~]*[!-~])?$",
}


class Header(NamedTuple):
    """Describe a header: name, meaning, an example, and the values that are not refused."""

    name: str
    meaning: str
    example: str
    schema: Mapping[str, object] = ANY_TEXT


_NAME: Final = f"1 to {names.MAX_LENGTH} printable characters."
REQUEST: Final = (
    Header("x-pawl-episode", f"Episode that the call belongs to. {_NAME}", "run-7"),
    Header("x-pawl-agent", f"Agent that makes the call; `default` if unnamed. {_NAME}", "writer"),
    Header("x-pawl-task", f"Task that the episode works on. {_NAME}", "invoice-113"),
    Header(
        "x-pawl-split",
        "`eval`: the call is part of an evaluation, and its episode is never trained on. `train` "
        "is what a call is otherwise, unless its task begins with `PAWL_EVAL_TASKS`. Any other "
        "value is ignored with a warning.",
        "eval",
    ),
    Header(
        "x-pawl-tool-status",
        "How the tools ended whose results this call sends: an RFC 9651 list of tokens "
        f"({', '.join(f'`{one}`' for one in TOOL_STATUSES)}) with the parameters "
        f"{', '.join(f'`{one}`' for one in PARAMETERS)}. `id` is required; texts have at most "
        f"{MAX_TEXT} characters; `ms` is the duration in milliseconds.",
        'ok;id="call_1", error;id="call_2";detail="exit 2"',
    ),
)
IDEMPOTENCY: Final = Header(
    "Idempotency-Key",
    "Makes it safe to send the same body again: it is stated once. 1 to 256 printable characters. "
    "Keys are shared by all proxies of one database, and a key never expires once its body is "
    "stored.",
    "run-7-final",
    PRINTABLE,
)
REPLY: Final = (
    Header("x-pawl-call", "Id of the recorded call, for feedback.", "019a1b2c-…"),
    Header("x-pawl-episode", "Episode that the call was assigned to.", "run-7"),
    Header(
        "x-pawl-policy",
        "Policy version that answered, or a policy that is not trained; absent if none did.",
        "smollm2@3",
    ),
    Header(
        "x-pawl-explored",
        "What was changed of the request because its episode explores: `temperature` with its new "
        "value, `seed` (left out), `strict` (of its tools, left out). Absent if nothing was.",
        "temperature=0.7, seed, strict",
    ),
    Header(
        "x-pawl-warning",
        "What the proxy ignored in the request, such as a malformed header. On `GET /v1/models`: "
        "upstreams that gave no list of models.",
        "x-pawl-task is empty; ignored",
    ),
)
FAULT: Final = Header(
    "x-pawl-fault",
    "On replies of status 400 and above: who caused the error. `client`, `proxy` or `upstream`; "
    "`upstream` also on errors that the upstream answered itself.",
    "client",
)
TENANT: Final = Header(
    "x-pawl-tenant",
    "Whose API key the request shows, on `GET /v1/models`. Absent for the default tenant's.",
    "team-a",
)
RETRY_AFTER: Final = Header("Retry-After", "Seconds after which to send it again.", "1")


class Source(NamedTuple):
    """Describe a place outside of Pawl's own names that may name an episode, and its namespace."""

    place: str
    name: str
    namespace: str


def episode_sources() -> list[Source]:
    """Return the foreign names of an episode, highest priority first."""
    tables = (
        ("header", names.SESSION_HEADERS),
        ("`metadata` field", (("user_id", "claude-code"), *names.METADATA)),
        ("body field", (*names.FIELDS, ("conversation", "conversation"))),
        ("W3C baggage", names.BAGGAGE),
    )
    return [Source(place, *entry) for place, table in tables for entry in table]
