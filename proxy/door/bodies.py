"""Check what a request's body, query or headers name, where that may be another tenant's.

What cannot be read here, or means different things to different readers, is refused: the upstream
may read another name in it.
"""

from typing import Final
from urllib.parse import parse_qsl

from proxy.door.kept import check_fields
from proxy.errors import BadRequest
from proxy.formats.base import ModelRequest
from proxy.formats.forms import FORM, Form, is_plain, read_form
from proxy.formats.kept import all_fields
from proxy.formats.repeated import repeated_name
from proxy.formats.steering import named_models
from proxy.http.wire import Headers, is_of_any_tenant
from proxy.policies.owners import Owners
from proxy.upstreams.upstreams import shown
from store.tenants import DEFAULT

CONTENT_TYPE: Final = b"content-type"
CONTENT_ENCODING: Final = b"content-encoding"
AS_IT_IS: Final = (b"", b"identity")
URLENCODED: Final = "urlencoded"
# What divides the fields of a form in a URL's encoding.
DIVIDERS: Final = (b"&", b";")


def check_call(owners: Owners, tenant: str, headers: Headers, request: ModelRequest) -> None:
    """Check that the body of a call names nothing that is hidden from its tenant.

    Raises:
        NotServed, NotKept: it names another tenant's version, or what is kept for all tenants.
        BadRequest: it is no JSON object, or not to whoever reads it, or steers what becomes of it.
    """
    if tenant != owners.sole:
        _check_object(owners, tenant, headers, request)


def check_forwarded(owners: Owners, tenant: str, headers: Headers, request: ModelRequest) -> None:
    """Check that a body, JSON or a form, names nothing that is not its tenant's.

    Raises:
        NotServed, NotKept, BadRequest: as `check_call` does; a form is no JSON object, and may be
            read.
    """
    if not request.body:
        return
    content_type = _type_of(headers, request.body)
    if not content_type.lower().startswith(FORM):
        _check_object(owners, tenant, headers, request)
        return
    form = _form(content_type, request.body)
    for text in form.texts:
        owners.check(tenant, text)
    check_fields(tenant, form.fields)


def check_query(owners: Owners, tenant: str, target: str) -> None:
    """Check that the query in a request's target names nothing that is not its tenant's.

    Raises:
        NotServed, NotKept, BadRequest: it does, as a body would.
    """
    for name, value in parse_qsl(target.partition("?")[2], keep_blank_values=True):
        owners.check(tenant, value, name)
        check_fields(tenant, {name: value})


def check_headers(owners: Owners, tenant: str, headers: Headers) -> None:
    """Check that no header that is passed on names a version that is hidden from the tenant.

    Raises:
        NotServed: one does.
    """
    if tenant != DEFAULT:
        return
    for name, value in headers:
        # Nearly no value has one, and a product's name and version may.
        if b"@" in value and not is_of_any_tenant(name):
            owners.check(tenant, value.decode("latin-1"), name.decode("latin-1"))


def _check_object(owners: Owners, tenant: str, headers: Headers, request: ModelRequest) -> None:
    owners.check_body(tenant, is_read=request.parsed is not None)
    _type_of(headers, request.body)
    try:
        twice = repeated_name(request)
        fields = all_fields(request)
    except ValueError as error:
        raise BadRequest(
            f"The body cannot be read ({error}), so it is not known what it names: send numbers "
            "of fewer digits, or texts in their place",
            code="invalid_json",
        ) from error
    if twice is not None:
        raise BadRequest(
            f"An object of the body has {shown(twice)!r} twice, and which of the two counts is not "
            "the same for all servers: send it once",
            param=shown(twice),
            code="unclear_body",
        )
    for name, text in named_models(fields):
        owners.check(tenant, text, name)
    check_fields(tenant, fields)


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
