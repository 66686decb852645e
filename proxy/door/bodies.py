"""Check what a request's body names, where it may name what is another tenant's.

What cannot be read here, or means different things to different readers, is refused: the upstream
may read another name in it.
"""

from typing import Final

from proxy.door.kept import check_fields, check_kept
from proxy.errors import BadRequest
from proxy.formats.base import ModelRequest
from proxy.formats.forms import FORM, Form, is_plain, read_form
from proxy.http.wire import Headers
from proxy.policies.owners import Owners

CONTENT_TYPE: Final = b"content-type"
CONTENT_ENCODING: Final = b"content-encoding"
AS_IT_IS: Final = (b"", b"identity")
URLENCODED: Final = "urlencoded"
# What divides the fields of a form in a URL's encoding.
DIVIDERS: Final = (b"&", b";")


def check_call(owners: Owners, tenant: str, headers: Headers, request: ModelRequest) -> None:
    """Check that the body of a call names no model that is hidden from its tenant.

    Raises:
        NotServed: it names another tenant's version.
        BadRequest: it is no JSON object, or not to whoever reads it.
    """
    owners.check_body(tenant, is_read=request.parsed is not None)
    if owners.hides_some(tenant):
        _type_of(headers, request.body)
    owners.check(tenant, request.model)


def check_forwarded(owners: Owners, tenant: str, headers: Headers, request: ModelRequest) -> None:
    """Check that a body, JSON or a form, names nothing that is not its tenant's.

    Raises:
        NotServed, NotKept: it names another tenant's version, or what is kept for all tenants.
        BadRequest: it is neither of both, or not to whoever reads it.
    """
    if not request.body:
        return
    content_type = _type_of(headers, request.body)
    if content_type.lower().startswith(FORM):
        form = _form(content_type, request.body)
        for text in form.texts:
            owners.check(tenant, text)
        check_fields(tenant, form.fields)
        return
    owners.check_body(tenant, is_read=request.parsed is not None)
    owners.check(tenant, request.model)
    check_kept(tenant, request)


def _form(content_type: str, body: bytes) -> Form:
    try:
        return read_form(content_type, body)
    except ValueError as error:
        raise BadRequest(
            f"The form in the body cannot be read ({error}), so it is not known what it names: "
            "send it as HTTP libraries write forms",
            code="invalid_form",
        ) from error


def _type_of(headers: Headers, body: bytes) -> str:
    """Return the content type of a body that means the same to whoever reads it.

    Raises:
        BadRequest: its headers, or a type that does not fit it, let it mean something else.
    """
    types = [value for name, value in headers if name.lower() == CONTENT_TYPE]
    codings = [value for name, value in headers if name.lower() == CONTENT_ENCODING]
    content_type = (types or [b""])[0].decode(errors="surrogateescape").strip()
    if len(types) > 1:
        raise _unclear("has several Content-Type headers", "send one")
    if any(coding.strip().lower() not in AS_IT_IS for coding in codings):
        raise _unclear("has a Content-Encoding", "send it without")
    if not is_plain(content_type):
        raise _unclear("is in another character set than UTF-8", "encode it as UTF-8")
    if URLENCODED in content_type.lower() and any(one in body for one in DIVIDERS):
        raise _unclear(
            "is sent as a form in a URL's encoding",
            "say what it is, as with Content-Type: application/json",
        )
    return content_type


def _unclear(why: str, remedy: str) -> BadRequest:
    return BadRequest(
        f"The body {why}, so it is not known which model it names: {remedy}", code="unclear_body"
    )
