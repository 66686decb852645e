"""Texts that do harm where they are taken for more than text, and calls that are full of them."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from proxy.ingester.transcribe import record_of
from proxy.spool.segments import encode_frame, read_frames
from store.ids import new_id
from store.records import FeedbackItem, FeedbackRecord, SpoolRecord, ToolEvent
from tests.support.records import captured

_RUN: Final = "window.ran=1"
_TAGS: Final = (
    *("script", "img", "svg", "iframe", "object", "embed", "video", "audio", "body", "input"),
    *("details", "marquee", "style", "link", "meta", "base", "form", "math", "template", "title"),
    *("textarea", "noscript", "xmp", "plaintext", "frameset", "portal", "dialog", "select"),
)
_HANDLERS: Final = (
    *("onload", "onerror", "onfocus", "onmouseover", "ontoggle", "onstart", "onbegin"),
    *("onanimationstart", "onpointerenter", "hx-on:load", "onbeforetoggle"),
)
_LINKS: Final = (
    *("javascript:", "JaVaScRiPt:", "java\tscript:", "\x01javascript:", "javascript&colon;"),
    *(
        "file:///etc/",
        "ftp://evil.invalid/",
        "ws:",
        "data:text/html,",
        "vbscript:",
        "blob:",
        "//evil.invalid/",
        "https://evil.invalid/",
    ),
)
_HTMX: Final = ("hx-get", "hx-post", "hx-trigger='load' hx-get", "hx-vals='js:", "data-hx-get")
_TEMPLATES: Final = (
    "{{ 7*7 }}",
    "{% include '/etc/passwd' %}",
    "{{ ''.__class__.__mro__ }}",
    "${7*7}",
    "#{7*7}",
    "<%= 7*7 %>",
    "{{constructor.constructor('window.ran=1')()}}",
    "%(key)s",
    "{0.__class__}",
    "{#",
    "[[${7*7}]]",
    "`${window.ran=1}`",
)
_ENDS: Final = (
    *("</script>", "</style>", "</textarea>", "</title>", "</pre>", "</bdi>", "</time>", "-->"),
    *("]]>", "'", '"', "`", "\\", "&#x3C;script&#x3E;", "&lt;script&gt;", "<!--", "<![CDATA["),
)
_UNSEEN: Final = (
    "\u202egnp.exe",
    "\u2066\u2067\u2068\u2069",
    "\u200b\u200c\u200d\u2060\ufeff",
    "\u0000\u0001\u0008\u001f\u007f\u009b",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x1b]8;;https://evil.invalid/\x07link\x1b]8;;\x07",
    "a\u0300\u0301\u0302\u0303\u0304\u0305\u0306\u0307" * 40,
    "\U000e0041\U000e0042\U000e007f",
    "\u2028line\u2029paragraph",
    "\r\nSet-Cookie: pawl_key=x\r\n\r\n<script>window.ran=1</script>",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u202dabc",
    "\ufffd\ufffe\uffff",
    "👩‍👩‍👧‍👦" * 20,
    "\u115f\u1160\u3164\uffa0",
    "ⓔⓥⓘⓛ \u212a\u017f",
    "\v\f\b\a",
)
# JSON can write these, and UTF-8 cannot.
_HALVES: Final = ("\\ud83d", "\\udc00\\ud800", "a\\udfffb")
_BIG: Final = ("x" * 1_000_000, "<b>" * 330_000, "字" * 330_000, "\\n" * 300_000)


def _texts() -> Iterator[str]:
    yield f"<script>{_RUN}</script>"
    yield f"</script><script>{_RUN}</script>"
    for tag in _TAGS:
        yield f"<{tag} src=x onerror={_RUN} onload={_RUN} autofocus onfocus={_RUN}>"
        yield f"</{tag}><{tag.upper()}/x=`><script>{_RUN}//`</script>"
    for handler in _HANDLERS:
        yield f'" {handler}="{_RUN}" x="'
        yield f"' autofocus {handler}={_RUN} x='"
    for link in _LINKS:
        yield f"{link}{_RUN}"
        yield f'<a href="{link}{_RUN}">here</a>'
        yield f"[here]({link}{_RUN})"
    for attribute in _HTMX:
        yield f"<div {attribute}='https://evil.invalid/{_RUN}'>"
    yield from _TEMPLATES
    for end in _ENDS:
        yield f"{end}<svg/onload={_RUN}>"
    yield from _UNSEEN
    yield from ("; DROP TABLE episodes; --", "' OR '1'='1", "\\x00\\'; SELECT pg_sleep(9)--")
    yield from ("../../etc/passwd", "..\\..\\", "%2e%2e%2f", "CON", "-rf", "$(id)", "`id`", "|id")
    yield from ("1e999", "NaN", "-0", "0x7fffffff", "٣", "null", "undefined", "__proto__", "true")
    yield from ("", " ", "\t", "\n" * 50, "a" * 5_000, "a b " * 2_000, "🏴" * 500)


TEXTS: Final = tuple(_texts())
# Of what names things: clients cannot make them longer.
LONGEST_NAME: Final = 200
NAMES: Final = tuple(dict.fromkeys(text.replace("\0", "")[:LONGEST_NAME] for text in TEXTS))


def records() -> list[SpoolRecord]:
    """Record each text as prompt, reply, tool, task, agent, metric, label and key of an episode."""
    made: list[SpoolRecord] = []
    for number, text in enumerate(TEXTS):
        made += _episode(number, text, json.dumps(text))
    for number, half in enumerate(_HALVES, len(TEXTS)):
        made += _episode(number, "half a pair", f'"{half}"')
    for number, big in enumerate(_BIG, len(TEXTS) + len(_HALVES)):
        made += _episode(number, "a long line", f'"{big}"')
    broken = b'\xff\xfe<script>window.ran=1</script>{"model":'
    made.append(_call("broken", "broken", "broken", broken, b"\x80\x81" + broken))
    return made


def _episode(number: int, text: str, quoted: str) -> list[SpoolRecord]:
    name = "".join(one for one in text if one not in "\0\x1f")[:LONGEST_NAME] or "empty"
    key = f"{number} {name}"
    tool = (
        f'[{{"id":{quoted},"type":"function","function":{{"name":{quoted},"arguments":{quoted}}}}}]'
    )
    request = (
        f'{{"model":"m","messages":[{{"role":"system","content":{quoted}}},{{"role":{quoted},'
        f'"content":{quoted}}},{{"role":"user","content":[{{"type":"text","text":{quoted}}},'
        f'{{"type":"image_url","image_url":{{"url":{quoted}}}}}]}},{{"role":"assistant","content":'
        f'null,"tool_calls":{tool}}},{{"role":"tool","tool_call_id":{quoted},"content":{quoted}}}],'
        f'"tools":[{{"type":"function","function":{{"name":{quoted},"description":{quoted}}}}}]}}'
    ).encode()
    reply = (
        f'{{"id":{quoted},"model":{quoted},"choices":[{{"index":0,"message":{{"role":"assistant",'
        f'"content":{quoted},"reasoning_content":{quoted},"tool_calls":{tool}}},"logprobs":'
        '{"content":[{"logprob":-0.5},{"logprob":-1.5}]},"finish_reason":"stop","token_ids":[4,5]}'
        '],"usage":{"completion_tokens":2},"prompt_token_ids":[1,2,3]}'
    ).encode()
    event = ToolEvent(
        id=new_id(), tool_id=name, name=name, status="error", detail=text.replace("\0", "")
    )
    statements = tuple(
        FeedbackItem(id=new_id(), metric=metric, value=value, target_kind="episode", target=key)
        for metric, value in (("reward", number % 2), (name, 0.5), ("label", name))
    )
    return [
        _call(key, name, name, request, reply, event),
        FeedbackRecord(id=new_id(), at=datetime.now(UTC), items=statements),
    ]


def _call(
    episode: str, task: str, agent: str, request: bytes, reply: bytes, *events: ToolEvent
) -> SpoolRecord:
    """Record a call as the ingester does: from the bytes that a worker wrote down."""
    call = captured(
        episode,
        id=new_id().bytes,
        task=task,
        agent=agent,
        request=request,
        reply=reply,
        tool_events=events,
        started_at=datetime.now(UTC).timestamp(),
    )
    [(_, payload)] = read_frames(encode_frame(call))
    return record_of(payload)
