"""Tokenise corrections, the only texts that Pawl trains on without recorded token ids.

The prompt keeps its recorded ids. The base model's own chat template renders the recorded messages,
once as a prompt and once with the correction as the reply. The first text must have exactly the
recorded ids, and the second must begin with them. So nothing is trained if the template or one of
its settings differs from the server's (docs/explanation/invariants.md, 4).
"""

from collections.abc import Container, Sequence
from typing import Any, Final, Literal

import msgspec

Refusal = Literal["no_messages", "other_template", "special_tokens", "no_end_of_turn"]
# Arguments of apply_chat_template that a request must not set, as they are no template variables.
_FIXED_ARGUMENTS: Final = {
    "tokenize": False,
    "chat_template": None,
    "continue_final_message": False,
}


def reply_ids(
    tokenizer: Any,
    ends: Container[int],
    request: bytes | None,
    prompt_ids: Sequence[int],
    text: str,
) -> tuple[int, ...] | Refusal:
    """Return the token ids of `text` as the reply to a prompt, (S,), or a reason for refusing it.

    The last id ends the turn, and is one of `ends`.

    - `no_messages`: the request is no chat, or was not stored.
    - `other_template`: the template does not give the recorded ids, or changes the correction.
    - `special_tokens`: the correction has a special token, such as the end of a turn.
    - `no_end_of_turn`: the template does not end the reply.
    """
    try:
        body = msgspec.json.decode(request or b"{}")
        if not (isinstance(body, dict) and body.get("messages")):
            return "no_messages"
        before, with_reply = _render_chat(tokenizer, body, text)
    except Exception:  # A template is a program, and it runs on an untrusted request.
        return "other_template"
    prompt, ids, alone = (
        tokenizer(part, add_special_tokens=False)["input_ids"]
        for part in (before, with_reply, text)
    )
    added = tokenizer.added_tokens_decoder
    if any(token in added and added[token].special for token in alone):
        return "special_tokens"
    has_text = with_reply.startswith(before) and text.strip() in with_reply[len(before) :]
    if not has_text or prompt != list(prompt_ids) or ids[: len(prompt)] != prompt:
        return "other_template"
    reply = ids[len(prompt) :]
    end = next((place for place, token in enumerate(reply) if token in ends), None)
    return "no_end_of_turn" if end is None else tuple(reply[: end + 1])


def _render_chat(tokenizer: Any, body: dict[str, Any], text: str) -> tuple[str, str]:
    """Return the text of a request's prompt, and the text of the prompt with the reply `text`."""
    messages = [_as_passed_to_template(message) for message in body["messages"]]
    named = {
        "tools": body.get("tools"),
        **(body.get("chat_template_kwargs") or {}),
        **_FIXED_ARGUMENTS,
    }
    render = tokenizer.apply_chat_template
    reply = {"role": "assistant", "content": text}
    return (
        render(messages, **(named | {"add_generation_prompt": True})),
        render([*messages, reply], **(named | {"add_generation_prompt": False})),
    )


def _as_passed_to_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to the template: texts joined, arguments parsed."""
    content = message.get("content")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        message["content"] = "\n".join(part["text"] for part in content)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        function["arguments"] = msgspec.json.decode(function.get("arguments") or "{}")
    return message
