"""Tell whether what a request shows the model is all text (pure).

The prompt's token ids hold an image, a sound or a file as a placeholder at most: what the model saw
cannot be computed again from them. A part of a type that nobody knows may be anything.
"""

from typing import Any, Final

import msgspec

from proxy.formats.json_parts import NULL, UNREADABLE, Object

# Parts that become text in the prompt, in all APIs; clients mix their words. A part without a type
# is a text in vLLM, unless one of `MEDIA_FIELDS` says otherwise.
TEXT_PARTS: Final = frozenset(
    {
        *(None, "text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"),
        *("reasoning", "reasoning_text", "summary_text", "tool_use", "tool_result"),
        *("tool_reference", "search_result", "server_tool_use", "web_search_tool_result"),
        *("web_search_result", "mcp_tool_use", "mcp_tool_result", "compaction"),
    }
)
# vLLM reads a part with a `uuid` by these, whatever its type (`vllm/renderers/chat_utils.py`).
MEDIA_FIELDS: Final = frozenset(
    {
        *("image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds"),
        *("video_url", "video_embeds", "prompt_embeds", "file"),
    }
)
STRUCTURES: Final = b"[{"

_objects: Final = msgspec.json.Decoder(list[Object])


def members_of(raw: msgspec.Raw | None) -> list[Object] | None:
    """Return a list's members with their values unparsed, or None if it is no list of objects."""
    if not _has_parts(raw):
        return []
    try:
        return _objects.decode(raw or b"")
    except UNREADABLE:
        return None


def is_only_text(content: msgspec.Raw | None) -> bool:
    """Return whether a content, which is a text, a part or a list of parts, is all text."""
    if not _has_parts(content):
        return True
    try:
        return is_text(msgspec.json.decode(content or b""))
    except UNREADABLE:
        return False


def is_given(raw: msgspec.Raw | None) -> bool:
    """Return whether a field has a value other than null."""
    return raw is not None and raw != NULL


def _has_parts(raw: msgspec.Raw | None) -> bool:
    # Without a copy: it may be all of a conversation.
    return raw is not None and memoryview(raw)[0] in STRUCTURES


def is_text(content: Any) -> bool:
    """Return whether a parsed content is all text; a tool's result has a content of its own."""
    if isinstance(content, list):
        return all(map(is_text, content))
    if not isinstance(content, dict):
        return True
    kind = content.get("type")
    known = isinstance(kind, str | None) and kind in TEXT_PARTS
    return known and MEDIA_FIELDS.isdisjoint(content) and is_text(content.get("content"))
