"""Find what a request names that its provider keeps for all tenants, such as a file (pure).

Files, vector stores, containers, stored prompts, sounds and voices lie under one account, and any
request may use them that names their id; so may a picture that vLLM has in its cache, which goes by
a `uuid` of its clients' choice. Whose they are is not known. A field is looked for by its name,
wherever it stands, except within what is the client's own: schemas, arguments and the like.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from proxy.formats.base import ModelRequest
from proxy.formats.conversation import MEDIA_FIELDS

# A text or a list of texts under one of these is an id.
IDS: Final = frozenset(
    {
        *("file_id", "file_ids", "vector_store_id", "vector_store_ids", "container_id"),
        *("container", "tunnel_id"),
    }
)
# An object under one of these that has an `id`: a stored prompt, a sound, a voice.
WITH_ID: Final = frozenset({"prompt", "audio", "voice", "container"})
# Blocks of a cache, or a session, at the server that was asked before: vLLM's and SGLang's.
BLOCKS: Final = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params", "session_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    }
)
SKILL: Final = "skill_id"
# Skills that the provider offers to everybody.
PUBLIC_SKILL: Final = "anthropic"
UUID: Final = "uuid"
# All of these: most fields are none.
NAMING: Final = frozenset({*IDS, *WITH_ID, *BLOCKS, SKILL, UUID})
# The client's own, whatever is in it; citations give access to nothing.
FREE: Final = frozenset(
    {
        *("parameters", "input_schema", "output_schema", "schema", "json_schema", "arguments"),
        *("metadata", "annotations", "citations", "chat_template_kwargs", "structured_outputs"),
        "documents",
    }
)
# Arguments, where it is an object (`tool_use`); else it may hold items of a conversation.
INPUT: Final = "input"

# How a value begins that has others in it.
STRUCTURES: Final = (b"[", b"{")
# An item of a conversation that names one which the provider keeps, instead of saying it.
REFERENCE: Final = "item_reference"
# Items that the provider looks up by their id if they come without what they say.
SAID_IN: Final[Mapping[str, tuple[str, ...]]] = {
    "reasoning": ("encrypted_content", "content"),
    "image_generation_call": ("result",),
    "file_search_call": ("results",),
}


def all_fields(request: ModelRequest) -> Mapping[str, Any]:
    """Return a request's fields, with those too that hold a number like 1e400.

    Raises:
        ValueError: a field cannot be read even so.
    """
    parsed = request.parsed or {}
    unread = {
        name: json.loads(bytes(parsed[name]))
        for name, value in request.fields.items()
        if isinstance(value, str) and bytes(parsed[name]).lstrip().startswith(STRUCTURES)
    }
    return {**request.fields, **unread} if unread else request.fields


def refers(items: object) -> bool:
    """Return whether an item of a conversation only names one that the provider keeps."""
    members = items if isinstance(items, list) else []
    return any(isinstance(one, dict) and _is_reference(one) for one in members)


def _is_reference(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    if kind is None:
        # The type of a reference may be left out, as may that of a message, which has a role.
        return bool(item.get("id")) and "role" not in item
    said_in = SAID_IN.get(kind, ()) if isinstance(kind, str) else ()
    only_named = bool(said_in and item.get("id")) and not any(map(item.get, said_in))
    return kind == REFERENCE or only_named


def kept_name(fields: Mapping[str, Any]) -> str | None:
    """Return the name of a field by which a request names what is kept, or None if none does."""
    waiting: list[Any] = [fields]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            for name, member in value.items():
                plain = name if name.isascii() and name.islower() else name.casefold()
                if plain in NAMING and _names(value, plain, member):
                    return str(name)
                nests = isinstance(member, list) or (isinstance(member, dict) and name != INPUT)
                if nests and name not in FREE:
                    waiting.append(member)
        else:
            waiting.extend(one for one in value if isinstance(one, (dict, list)))
    return None


def _names(owner: Mapping[str, Any], name: str, member: Any) -> bool:
    """Return whether a member of an object names something that is kept."""
    if name in IDS and isinstance(member, (str, list)):
        return bool(member)
    if name in WITH_ID and isinstance(member, dict):
        return bool(member.get("id"))
    if name == UUID:
        return member is not None and not MEDIA_FIELDS.isdisjoint(owner)
    if name == SKILL:
        return bool(member) and owner.get("type") != PUBLIC_SKILL
    return name in BLOCKS and member not in (None, {}, [])
