"""Merge the events of Anthropic's stream into one message (pure)."""

from typing import Any, Final

import msgspec

from proxy.formats.requests import UNREADABLE
from store.values.json_limits import nests_too_deep

# The field of a block where a tool's input is gathered until the block ends.
PARTIAL_INPUT: Final = "_input"
# By a delta's type: its field, and the block's field that it is appended to.
_BLOCK_DELTAS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", PARTIAL_INPUT),
}


def merge_message_event(message: dict[str, Any], event: dict[str, Any]) -> None:
    """Add one event of Anthropic's stream to `message`, in place; a malformed one adds nothing."""
    kind, index = event.get("type"), event.get("index")
    if kind == "message_start" and isinstance(event.get("message"), dict):
        message |= event["message"] | {"content": []}
    elif kind == "message_delta":
        for part in ("delta", "usage"):
            values = event.get(part)
            target = message if part == "delta" else message.setdefault("usage", {})
            if isinstance(values, dict) and isinstance(target, dict):
                target |= values
    elif kind == "content_block_start" and isinstance(event.get("content_block"), dict):
        message.setdefault("content", []).append(dict(event["content_block"]))
    elif kind in ("content_block_delta", "content_block_stop"):
        content = message.get("content", [])
        if isinstance(index, int) and 0 <= index < len(content):
            _merge_block(content[index], event.get("delta"), stop=kind == "content_block_stop")


def _input_of(text: str) -> Any:
    """Return a tool's input: text if it is not JSON, unparsed if it nests too deep."""
    encoded = text.encode(errors="surrogatepass")
    if nests_too_deep(encoded):
        return msgspec.Raw(encoded)
    try:
        return msgspec.json.decode(encoded) if encoded else {}
    except UNREADABLE:
        return text


def _merge_block(block: dict[str, Any], delta: Any, *, stop: bool) -> None:
    """Append a delta to a block; a tool's input is JSON in pieces, parsed at the block's end."""
    if stop and PARTIAL_INPUT in block:
        block["input"] = _input_of(block.pop(PARTIAL_INPUT))
    if isinstance(delta, dict) and delta.get("type") in _BLOCK_DELTAS:
        source, target = _BLOCK_DELTAS[delta["type"]]
        if isinstance(delta.get(source), str):
            block[target] = str(block.get(target) or "") + delta[source]
