"""Write prompts, canned replies and chunks as they are on the wire, in vLLM's words (pure)."""

import json
import re
from typing import Final

MODEL: Final = "m"
# Sent with every call; LiteLLM does not start without one.
KEY: Final = "sk-only-for-this-benchmark"
PROMPT_CHARS: Final = 4000
PROMPT_TOKENS: Final = 200
MODELS: Final = json.dumps({"object": "list", "data": [{"id": MODEL, "owned_by": "vllm"}]})
VERSION: Final = json.dumps({"version": "0.32.0"})
# A request with less than this gets the large reply: an agent's body is never so small.
SMALL_BODY: Final = 1000
STAMP: Final = re.compile(rb'"content":\s?"@([0-9.]+)"')
IDS_ASKED: Final = re.compile(rb'"return_token_ids":\s?true')
TOKENS_ASKED: Final = re.compile(rb'"max_tokens":\s?(\d+)')
IDS_SHOWN: Final = re.compile(rb'"(?:prompt_)?token_ids":\s?\[')


def reply(tokens: int) -> str:
    """Write a chat completion with ids and log-probabilities; 20 tokens are 2.9 KB, 1240 100 KB."""
    logprob = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * (3 * tokens)},
        "logprobs": {"content": [logprob] * tokens},
        "finish_reason": "stop",
        "token_ids": list(range(tokens)),
    }
    whole = {
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
    return json.dumps(whole, separators=(",", ":"))


def prompt(mark: str, chars: int = PROMPT_CHARS) -> str:
    """Write a request's body; `mark` begins its message, so that no two calls say the same."""
    message = {"role": "user", "content": mark + "x" * chars}
    return json.dumps({"model": MODEL, "messages": [message]}, separators=(",", ":"))


def stream_prompt(mark: str, chunks: int) -> bytes:
    """Write a body that asks for a stream of so many chunks."""
    return f'{prompt(mark)[:-1]},"max_tokens":{chunks},"stream":true}}'.encode()


def post(host: str, path: str, body: bytes, key: str = KEY) -> bytes:
    """Write the whole HTTP request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def chunk(written: float, *, first: bool, last: bool, ids: bool) -> bytes:
    """Write one event as vLLM sends it; `written` is the time it says it was written at."""
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


def framed(piece: bytes) -> bytes:
    """Write one piece in HTTP/1.1's chunked transfer coding (RFC 9112 §7.1)."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)
