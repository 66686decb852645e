"""Requests that try to be read otherwise than they look (RFC 9110, RFC 9112, RFC 3986)."""

from collections.abc import Mapping
from typing import Final

from tests.fuzz.ports.conftest import INFER, KEYS
from tests.fuzz.ports.document import REPEATED, called_paths, forwarded_paths
from tests.fuzz.tape import Tape
from tests.fuzz.texts import damaged

FORBIDDEN: Final = (
    *(b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/sleep", b"/reset_prefix_cache"),
    *(b"/collective_rpc", b"/metrics", b"/health", b"/docs", b"/v1/chat/completions/batch"),
    *(b"/v1/models/m", b"/v1/organization/admin_api_keys", b"/v1/fine_tuning/jobs", b"/"),
    *(b"/v1/responses/x/render", b"/healthz", b"/readyz", b"/version", b"/server_info"),
)
ALLOWED: Final = tuple(
    (method, REPEATED.sub("/x1/x2", path).replace("{id}", "x1").replace("{model}", "m").encode())
    for method, path in (
        *(("POST", path) for path in called_paths()),
        *[("POST", "/feedback")] * 8,
        *forwarded_paths(),
    )
)
METHODS: Final = (
    *(b"POST", b"POST", b"POST", b"GET", b"DELETE", b"HEAD", b"PUT", b"PATCH", b"OPTIONS"),
    *(b"CONNECT", b"TRACE", b"PROPFIND", b"post", b"GET\t", b"", b"P\xc3\x96ST", b"QUERY"),
)
BEFORE: Final = (
    *(b"/episode/e1", b"/task/t/episode/e/agent/a", b"/agent/w", b"/split/eval", b"/task/%00"),
    *(b"/episode/%0d%0ax-injected:%20yes", b"/agent/..%2f..%2f", b"/episode/..", b"/task/\xff"),
    *(
        b"/episode/%2e%2e/..",
        b"/episode/e/task/t",
        b"/agent/%F0%9F%98%80",
        b"/episode/" + b"e" * 300,
    ),
    *(
        b"http://127.0.0.1:8000",
        b"http://evil.example",
        b"https://u:p@h:1",
        b"//evil.example",
        b"/.",
    ),
)
BETWEEN: Final = (b"//", b"/./", b"/../", b"/x/../", b"/%2e/", b"/%2e%2e/", b"%2f", b"\\", b"/;/")
BETWEEN_TOO: Final = (b"%252f", b"/%c0%ae%c0%ae/", b"/.%00/", b"%5c", b"/\xe2\x80\xa4\xe2\x80\xa4/")
AFTER: Final = (
    *(b"?", b"?a=b", b"?x=/v1/load_lora_adapter", b"?\xff\xfe", b"#f", b"/", b"/.", b"/..", b";x"),
    *(
        b"%00",
        b"%20",
        b"?a?b#c",
        b"/%2e%2e/load_lora_adapter",
        b"%0d%0a",
        b"?%0d%0ax-injected:%20y",
    ),
    *(b"?a HTTP/1.1", b".json", b"/../../sleep", b"?" + b"q" * 9_000, b"@1", b"/x?api_key=k"),
)
HEADERS: Final = (
    *(b"Content-Type: application/json", b"Content-Type: multipart/form-data; boundary=b"),
    *(b"Connection: close, x-mark", b"Connection: authorization, x-api-key, host, content-type"),
    *(b"Connection: keep-alive, content-length", b"Connection: ,,\xff", b"Keep-Alive: 5"),
    *(b"Upgrade: h2c", b"Upgrade: websocket\r\nConnection: upgrade", b"HTTP2-Settings: AA"),
    *(b"Expect: 100-continue", b"Expect: x", b"TE: trailers", b"Trailer: Authorization"),
    *(b"X-Forwarded-For: 127.0.0.1", b'Forwarded: for="[::1]"', b"X-Real-IP: ::1", b"Via: 1.1 a"),
    *(b"X-Original-URL: /v1/load_lora_adapter", b"X-Rewrite-URL: /sleep", b"X-HTTP-Method: DELETE"),
    *(
        b"X-HTTP-Method-Override: DELETE",
        b"Host: evil.example",
        b"Host:",
        b"Host: a\tb",
        b"Host : a",
    ),
    *(b" folded: value", b"X-Fold: a\r\n b", b"X-Fold:\r\n\tAuthorization: x", b"X-Nul: a\x00b"),
    *(b"X-Lf: a\nx-injected: yes", b"X-Cr: a\rx-injected: yes", b"x-pawl-episode: \xff\xfe\x80"),
    *(b"x-pawl-fault: proxy", b"X-Pawl-Call: 1", b"x-pawl-task: a\tb", b"X-P\xc3\xa4wl: \xc3\xa4"),
    *(b'x-pawl-tool-status: ok;id="1"', b"Baggage: pawl.episode=%0d%0a", b": no name", b"no colon"),
    *(
        b"Cookie: a=b",
        b"Accept-Encoding: gzip, br",
        b"Accept: text/event-stream",
        b"Range: bytes=0-",
    ),
    *(b"Content-Encoding: gzip", b"Idempotency-Key: k", b"Idempotency-Key: \xff", b"X_Api_Key: k"),
    *(b"Content_Length: 9", b"Transfer_Encoding: chunked", b"Proxy-Authorization: Basic eDp5"),
    b"\r\n".join(b"X-Many-%d: y" % number for number in range(700)),
    b"X-Long: " + b"y" * 70_000,
    *(b"X-Huge: " + b"y" * 270_000, b"Authorization:", b"X-Api-Key:", b"Api-Key: \t"),
)
LENGTHS: Final = (
    *(b"Content-Length: %d", b"Content-Length: %d", b"Content-Length: %d", b"Content-Length: +%d"),
    *(b"Content-Length: %d\r\nContent-Length: %d", b"Content-Length: 0\r\nContent-Length: %d"),
    *(
        b"Content-Length: %d, %d",
        b"Content-Length: 0x%d",
        b"Content-Length: %d_0",
        b"Content-Length: -%d",
    ),
    *(
        b"Content-Length: %d \t",
        b"Content-Length:%d",
        b"Content-Length : %d",
        b"Content-Length: 00%d",
    ),
    *(
        b"content-length: %d",
        b"Content-Length: \x0b%d",
        b"Content-Length: 1%d",
        b"Content-Length: \xb2",
    ),
    *(b"Content-Length: 18446744073709551615", b"Content-Length: 99999999999999999999", b""),
)
CODINGS: Final = (
    *(b"chunked", b"chunked", b"chunked", b"Chunked", b"chunked, chunked", b"gzip, chunked"),
    *(b"identity", b"chunked, identity", b"xchunked", b"\x0bchunked", b"chunked\t", b'"chunked"'),
    *(b"chunked;q=1", b"", b",chunked", b"chunked\r\nTransfer-Encoding: identity", b"gzip"),
    *(b"\r\n chunked", b"chunked\r\n\t, identity", b"ch\xc3\xbcnked"),
)
SIZES: Final = (
    b"%x",
    b"%x",
    b"%x",
    b"%X;a=b",
    b"0%x",
    b"0x%x",
    b"%x ",
    b"+%x",
    b"%x;\n",
    b'%x;a="\r"',
)
TRAILERS: Final = (
    *(b"", b"", b"", b"X: y\r\n", b"Authorization: Bearer x\r\n", b"Content-Length: 5\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b" folded\r\n", b"Host: b\r\nx-mark: nobody\r\n"),
)
ENDS: Final = (b"\r\n",) * 14 + (b"\n", b"\r")
VERSIONS: Final = (b"HTTP/1.1",) * 12 + (
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/1.2",
    b"",
    b"HTTP/01.1",
    b"x",
)
# What a server further on would take for a request, if it saw another end of the body than we.
WITHIN: Final = (
    b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: a\r\nx-mark: nobody\r\nContent-Length: 5\r\n\r\n"
)
MODELS: Final = (
    b"m",
    b"writes",
    b"a-writes@1",
    b"m@1",
    b"gpt-4o",
    b"../x",
    b"\\u0000",
    b"m\\r\\nx: y",
)
SHOWN: Final = (
    *(b"Authorization: Bearer %b", b"Authorization: Bearer %b", b"x-api-key: %b"),
    *(b"AUTHORIZATION: bearer %b", b"X-API-KEY:%b", b"api-key: %b", b"Authorization: %b"),
    *(b"Authorization: Basic %b", b"Authorization: Bearer  %b\t", b"Authorization:\tBearer %b"),
    *(b"Authorization: Bearer\t%b", b"Authorization: Bearer x\r\nAuthorization: Bearer %b"),
    *(b"Authorization: Bearer x\r\nx-api-key: %b\r\nApi-Key: %b", b"Authorization : Bearer %b"),
    *(
        b"Authorization: Bearer\r\n %b",
        b"Authorization: Bearer %b, Bearer x",
        b"Proxy-Authorization: Bearer %b",
    ),
)


# Keys are made when a proxy is; until then their names stand for them.
NAMES: Final = ("infer", "all", "a", *KEYS, "wrong", "")


def with_keys(text: bytes, keys: Mapping[str, str]) -> bytes:
    """The same with keys in place of their names."""
    for name, key in keys.items():
        text = text.replace(b"<<%b>>" % name.encode(), key.encode())
    return text


def connection(tape: Tape) -> bytes:
    """All that a client sends on one connection: some requests, one right after another."""
    return _damaged(tape) if tape.rarely() else _several(tape)


def _several(tape: Tape) -> bytes:
    return b"".join(_request(tape) for _ in range(1 + max(0, tape.below(5) - 2)))


_damaged = damaged(_several)


def _request(tape: Tape) -> bytes:
    method, target = _asked(tape)
    name = tape.pick(NAMES)
    version = tape.pick(VERSIONS) if tape.rarely() else VERSIONS[0]
    lines = [b"%b %b %b" % (method, target, version)]
    lines += [] if tape.rarely() and tape.rarely() else [b"Host: a"]
    lines.append(b"x-mark: " + (b"infer" if name in INFER else b"nobody"))
    if name:
        shown = tape.pick(SHOWN) if tape.below(4) == 3 else SHOWN[0]
        lines.append(shown.replace(b"%b", b"<<%b>>" % name.encode()))
    lines += [tape.pick(HEADERS) for _ in range(max(0, tape.below(5) - 2))]
    return _framed(tape, lines, _body(tape, target))


def _asked(tape: Tape) -> tuple[bytes, bytes]:
    """Method and target: often allowed, and then written otherwise."""
    if tape.below(4) < 3:
        allowed, path = tape.pick(ALLOWED)
        method = tape.pick(METHODS) if tape.rarely() else allowed.encode()
    else:
        method, path = tape.pick(METHODS), tape.pick(FORBIDDEN)
    if tape.below(4) == 3:
        path = tape.pick(BEFORE) + path
    if tape.rarely():
        parts = path.split(b"/")
        at = tape.below(len(parts))
        between = tape.pick(BETWEEN + BETWEEN_TOO)
        path = b"/".join(parts[:at]) + between + b"/".join(parts[at:])
    if tape.rarely():
        at = tape.below(len(path))
        path = path[:at] + b"%%%02x" % path[at] + path[at + 1 :]
    return method, path + (tape.pick(AFTER) if tape.rarely() else b"")


def _body(tape: Tape, target: bytes) -> bytes:
    match tape.below(5):
        case 4:
            return b"" if tape.below(2) else b"0\r\n\r\n" + WITHIN
        case 1 if b"feedback" in target:
            return b'{"value": 1, "episode": "e"}'
        case 1:
            return b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\na-writes@1\r\n--b--'
        case _:
            body = b'{"model":"%b","messages":[{"role":"user","content":"q"}],"stream":%b}'
            return body % (tape.pick(MODELS), tape.pick((b"false", b"true", b"1")))


def _framed(tape: Tape, lines: list[bytes], body: bytes) -> bytes:
    """The head with something that says how long the body is, rightly or not."""
    how = tape.below(8)
    if how not in (6, 7):
        sized = tape.pick(LENGTHS) if how == 5 else LENGTHS[0]
        lines.append(sized.replace(b"%d", b"%d" % len(body)))
    if how in (4, 6, 7):
        # Beside a length, it says something else than that does.
        lines.append(b"Transfer-Encoding: " + (CODINGS[0] if how == 6 else tape.pick(CODINGS)))
        body = _chunked(tape, body)
    end = b"\r\n"
    head = b"".join(line + (tape.pick(ENDS) if tape.rarely() else end) for line in lines if line)
    return head + end + body


def _chunked(tape: Tape, body: bytes) -> bytes:
    size = (tape.pick(SIZES) if tape.rarely() else SIZES[0]) % len(body)
    first = b"%b\r\n%b\r\n" % (size, body) if body else b""
    return first + b"0\r\n" + (tape.pick(TRAILERS) if tape.rarely() else b"") + b"\r\n"
