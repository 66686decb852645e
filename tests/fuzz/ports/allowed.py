"""What the OpenAPI document allows a model server to be asked, and what no server must be asked.

Made of the document alone, not of the proxy's routes: what one of both forgets, the other has.
"""

import json
import re
from collections.abc import Iterator
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
