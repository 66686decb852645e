"""Requests that schemathesis makes of the OpenAPI document, sound and unsound, to both ports."""

from typing import Any, Final

import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from tests.fuzz.ports.conftest import KEYS, UPSTREAM_KEY, Ports
from tests.fuzz.ports.document import DOCUMENT, whole_document
from tests.fuzz.ports.test_requests import DOCUMENTED
from tests.fuzz.profile import fuzzing

SCHEMA: Final = schemathesis.openapi.from_dict(whole_document())
ADMIN: Final = frozenset(path for path, item in DOCUMENT["paths"].items() if "servers" in item)
OURS: Final = frozenset({"/feedback", *ADMIN})
# What holds for every reply that the proxy makes itself.
SHAPES: Final = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
# What holds where the proxy reads the request itself, and lets its sender in.
READS: Final = (checks.positive_data_acceptance, checks.negative_data_rejection)
NAMES: Final = (*KEYS, "wrong", "")
PATIENCE_S: Final = 60.0


def cases() -> st.SearchStrategy[Case]:
    """Requests as the document has them and as it does not, half of them of its own paths.

    The forwarded routes are many times as many.
    """
    own = list(DOCUMENT["paths"])
    made = [
        chosen.as_strategy(generation_mode=mode)
        for chosen in (SCHEMA.include(path=own), SCHEMA.exclude(path=own))
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    return st.sampled_from(range(len(made))).flatmap(made.__getitem__)


def scopes_of(operation: Any) -> set[str]:
    """The scopes that the document asks for; none: no key is asked for."""
    schemes = operation.definition.raw.get("security", [])
    return {scope for scheme in schemes for scopes in scheme.values() for scope in scopes}


@fuzzing(300)
@given(case=cases(), name=st.sampled_from(NAMES))
def test_any_request_gets_an_answer_that_the_openapi_document_allows(
    ports: Ports, case: Case, name: str
) -> None:
    path = case.operation.path
    port = ports.admin if path in ADMIN else ports.data
    key = {"Authorization": f"Bearer {ports.keys[name]}"} if name else {}
    with requests.Session() as session:
        session.trust_env = False
        reply = case.call(
            f"http://127.0.0.1:{port}", session, {"x-api-key": "", **key}, timeout=PATIENCE_S
        )
    status, fault = reply.status_code, reply.headers.get("x-pawl-fault", [""])[0]
    assert status < 500 or (status, fault) in DOCUMENTED, reply.text
    asked, has = scopes_of(case.operation), KEYS.get(name, ("", ()))[1]
    # What needs no key is answered whichever is sent.
    may = not asked or (name != "revoked" and asked <= set(has))
    assert may or status >= 400, (name, reply.text)
    if path in OURS or fault == "client":
        case.validate_response(reply, [*SHAPES, *(READS if may and path == "/feedback" else ())])
    assert UPSTREAM_KEY.encode() not in reply.content
    ports.check()
