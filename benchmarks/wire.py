"""Make canned requests and replies in vLLM's format, as sent over HTTP."""

import json
import re
from collections.abc import Mapping
from typing import Final

MODEL: Final = "m"
CHAT: Final = "/v1/chat/completions"
# Sent with every call; LiteLLM does not start without one.
KEY: Final = "sk-only-for-this-benchmark"
PROMPT_CHARS: Final = 4000
PROMPT_TOKENS: Final = 200
MODELS: Final = json.dumps({"object": "list", "data": [{"id": MODEL, "owned_by": "vllm"}]})
VERSION: Final = json.dumps({"version": "0.32.0"})
HEAD_END: Final = b"\r\n\r\n"
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
STAMP: Final = re.compile(rb'"content":\s?"@([0-9.]+)"')


def reply(tokens: int) -> str:
    """Return a chat completion with ids and log-probabilities: 2.9 KB for 20 tokens."""
    logprob = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * (3 * tokens)},
        "logprobs": {"content": [logprob] * tokens},
        "finish_reason": "stop",
        "token_ids": list(range(tokens)),
    }
    completion = {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1760000000,
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": tokens,
            "total_tokens": PROMPT_TOKENS + tokens,
        },
        "prompt_token_ids": list(range(1000, 1000 + PROMPT_TOKENS)),
    }
    return json.dumps(completion, separators=(",", ":"))


def prompt(mark: str, chars: int = PROMPT_CHARS) -> str:
    """Return a request's body; its message begins with `mark`, so that all calls differ."""
    message = {"role": "user", "content": mark + "x" * chars}
    return json.dumps({"model": MODEL, "messages": [message]}, separators=(",", ":"))


def as_stream(body: str, chunks: int) -> str:
    """Return a request's body that asks for a stream of `chunks` chunks instead."""
    return f'{body[:-1]},"max_tokens":{chunks},"stream":true}}'


def post(host: str, path: str, body: str, headers: Mapping[str, str]) -> bytes:
    """Return a complete HTTP request."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{lines}"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def http_reply(body: bytes) -> bytes:
    """Return a complete HTTP reply."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + HEAD_END + body


def chunk(written: float, *, first: bool, last: bool, ids: bool) -> bytes:
    """Return one event as vLLM sends it; its text is the time `written`."""
    role = '"role":"assistant",' if first else ""
    finish = '"stop"' if last else "null"
    logprobs = (
        '{"content":[{"token":" word","logprob":-0.5123456,"bytes":[32,119,111,114,100],'
        '"top_logprobs":[]}]}'
    )
    prompt_ids = f',"prompt_token_ids":{[*range(1000, 1000 + PROMPT_TOKENS)]}' if first else ""
    return (
        'data: {"id":"chatcmpl-9f0c2a6b","object":"chat.completion.chunk","created":1760000000,'
        f'"model":"{MODEL}","choices":[{{"index":0,"delta":{{{role}"content":"@{written:.6f}"}},'
        f'"logprobs":{logprobs if ids else "null"},"finish_reason":{finish},'
        f'"token_ids":{"[1234]" if ids else "null"}}}]{prompt_ids if ids else ""}}}\n\n'
    ).encode()


def as_http_chunk(piece: bytes) -> bytes:
    """Return `piece` in HTTP/1.1's chunked transfer coding (RFC 9112 §7.1)."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


STREAM_END: Final = as_http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

# Replies that are hard to store, by the word after `POISON` in the request that asks for one.
POISON: Final = "poison-"
_TOOL: Final = (
    b'{"id":"r","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":'
    b'{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"f","arguments":%b}}]},'
    b'"finish_reason":null}]}'
)
_WORDS: Final = (
    b'{"id":"%b","object":"chat.completion","model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"%b"},"finish_reason":"stop"}],"usage":null}'
)
POISONED: Final[Mapping[str, bytes]] = {
    "nested": _TOOL % (b'{"a":' * 2_000 + b"1" + b"}" * 2_000),
    "nul": _WORDS % (b"nul\\u0000", b"x"),
    "bytes": _WORDS % (b"r", b"\xff\xfe"),
    "surrogate": _WORDS % (b"\\ud83d", b"\\udc00"),
    "number": _WORDS.replace(b"null", b'{"completion_tokens":1e400}') % (b"r", b"x"),
}


def poisoned_reply(request: bytes) -> bytes | None:
    """Return the hard-to-store reply that a request asks for; None if it asks for none."""
    _, found, rest = request.partition(POISON.encode())
    return POISONED[rest.partition(b" ")[0].decode()] if found else None
