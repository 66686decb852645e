"""The OpenAPI document: its routes, and what it allows a model server to be asked.

Made of the document alone, not of the proxy's routes: what one of both forgets, the other has.
"""

import json
import re
from collections.abc import Iterator
from itertools import count
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from tests.conftest import ROOT

DOCUMENT: Final[dict[str, Any]] = json.loads(
    (ROOT / "docs" / "reference" / "openapi.json").read_text()
)
# A path of the document in which a part may follow several times.
REPEATED: Final = re.compile(r"\[/\{id\}\] \(0 to (\d+) times\)")
ID: Final = rb"(?!\.)[A-Za-z0-9_.:-]+"
MODEL: Final = rb"(?!\.)[A-Za-z0-9_.@:+-]+(?:/(?!\.)[A-Za-z0-9_.@:+-]+)*"
# Of vLLM and of servers like it: adapters, administration, and what OpenAI's API has no part in.
NEVER: Final = frozenset(
    b"load_lora_adapter unload_lora_adapter sleep wake_up is_sleeping reset_prefix_cache "
    b"reset_mm_cache collective_rpc pause resume is_paused scale_elastic_ep update_weights "
    b"init_weight_transfer_engine server_info start_profile stop_profile metrics health ping "
    b"version docs openapi.json invocations render derender batch".split()
)


def called_paths() -> list[str]:
    """The paths of recorded calls."""
    return [path for path in DOCUMENT["paths"] if path.startswith("/v1/")]


def forwarded_paths() -> Iterator[tuple[str, str]]:
    """Method and path of each route that is forwarded with the proxy's own key."""
    for route in DOCUMENT["x-pawl-forwarded"]["routes"]:
        if not route["account"]:
            yield from ((method, path) for method in route["methods"] for path in route["paths"])


def collections() -> Iterator[bytes]:
    """The paths that names of models or stored things follow, but where servers have endpoints."""
    named = {re.split(r"\[?/\{", path)[0] for _, path in forwarded_paths() if "/{" in path}
    yield from (f"{path}/".encode() for path in named - set(called_paths()))


COLLECTIONS: Final = tuple(collections())


def _pattern(path: str) -> bytes:
    text = re.escape(REPEATED.sub("<several>", path)).encode()
    text = text.replace(rb"\{id\}", ID).replace(rb"\{model\}", MODEL)
    return text.replace(b"<several>", b"(?:/%b){0,6}" % ID)


ALLOWED: Final = tuple(
    (method, re.compile(_pattern(path) + rb"\Z"))
    for method, path in (*(("POST", path) for path in called_paths()), *forwarded_paths())
)


def is_allowed(method: bytes, target: bytes) -> bool:
    """Whether a model server may be asked this, with the proxy's own key."""
    path = target.partition(b"?")[0]
    reading = b"GET" if method == b"HEAD" else method
    if not any(reading == one.encode() and pattern.match(path) for one, pattern in ALLOWED):
        return False
    # Names may be any words, and no server has an endpoint among them.
    return path.startswith(COLLECTIONS) or not is_forbidden(path)


def is_forbidden(path: bytes) -> bool:
    """Whether some server could read it as one of its own endpoints, in any spelling."""
    plain = unquote_to_bytes(unquote_to_bytes(path)).lower().replace(b"\\", b"/")
    return not NEVER.isdisjoint(plain.split(b"/"))


JSON: Final = "application/json"
# Of the parts that may follow a path, so many are tried.
DEEPEST: Final = 2
PASSED_ON: Final = {"default": {"description": "The upstream's reply.", "content": {"*/*": {}}}}


def whole_document() -> dict[str, Any]:
    """Every route of both ports with its scope, in paths alone, which schemathesis reads."""
    paths: dict[str, Any] = {path: dict(item) for path, item in DOCUMENT["paths"].items()}
    for route in DOCUMENT["x-pawl-forwarded"]["routes"]:
        for path in (full for short in route["paths"] for full in _repeated(short)):
            named, names = _named(path)
            item = paths.setdefault(named, {})
            for method in route["methods"]:
                item[method.lower()] = _operation(method, names, route["security"])
    return DOCUMENT | {"paths": paths}


def _repeated(path: str) -> Iterator[str]:
    if REPEATED.search(path) is None:
        yield path
        return
    yield from (REPEATED.sub("/{id}" * times, path) for times in range(DEEPEST + 1))


def _named(path: str) -> tuple[str, list[str]]:
    """The path with a name of its own for each parameter, and the names."""
    number, names = count(1), []
    for part in ("{id}", "{model}"):
        while part in path:
            names.append(f"p{next(number)}")
            path = path.replace(part, f"{{{names[-1]}}}", 1)
    return path, names


def _operation(method: str, names: list[str], security: Any) -> dict[str, Any]:
    places = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    anything = {"requestBody": {"content": {JSON: {"schema": {"type": "object"}}}}}
    return {
        "parameters": places,
        "security": security,
        "responses": PASSED_ON,
        **(anything if method == "POST" else {}),
    }
