"""A tenant's body is passed on if all who read it read the same, and nobody else's names."""

from typing import Any

import msgspec
import pytest

from proxy.door.bodies import check_call, check_forwarded, check_query
from proxy.errors import BadRequest, NotKept, NotServed
from proxy.formats.base import read_request
from proxy.http.wire import Headers
from proxy.policies.owners import Owners
from store.policy_table import parse_policies
from store.tenants import DEFAULT

OWNERS = Owners(
    parse_policies(
        '[[policy]]\nname = "pa"\nbase = "m"\ntenant = "a"\n'
        '[[policy]]\nname = "pb"\nbase = "m"\ntenant = "b"\n',
        "p.toml",
    )
)
ALONE = Owners(None)
FORM = b"multipart/form-data; boundary=x"
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\xff\x00\r\n'


def form(*pairs: tuple[str, str], charset: str = "utf-8") -> bytes:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        % (name.encode(), value.encode(charset))
        for name, value in pairs
    ]
    return b"".join(parts) + FILE + b"--x--\r\n"


def forwarded(tenant: str, body: bytes, *types: bytes, **headers: bytes) -> None:
    given: Headers = [(b"Content-Type", one) for one in types]
    given += [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    check_forwarded(OWNERS, tenant, given, read_request(body))


@pytest.mark.parametrize("model", ["pb@1", " pb@1", "pb@1\r\n", "pb@999", "nobody@1"])
@pytest.mark.parametrize("name", ["model", "svg[model]", "anything"])
def test_a_form_names_no_version_of_another_tenant(model: str, name: str) -> None:
    forwarded("a", form(("model", "pa@1"), ("prompt", "write to me@home")), FORM)
    with pytest.raises(NotServed, match="no version"):
        forwarded("a", form(("model", "m"), (name, model)), FORM)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("file_id", "file-1"),
        ("mask[file_id]", "file-1"),
        ("images[0][file_id]", "file-1"),
        ("images[][file_id]", "file-1"),
        ("file_ids[]", "file-1"),
        ("mask", '{"file_id": "file-1"}'),
        ("images", '[{"file_id": "file-1"}]'),
        ("voice[id]", "voice_1"),
        ("vllm_xargs", '{"kv_transfer_params": {"do_remote_prefill": true}}'),
    ],
)
def test_a_form_names_nothing_that_is_kept_for_all(name: str, value: str) -> None:
    body = form(("model", "m"), (name, value))
    forwarded(DEFAULT, body, FORM)
    with pytest.raises(NotKept, match="kept for all tenants"):
        forwarded("a", body, FORM)


def test_a_form_that_says_all_itself_is_let_through() -> None:
    fields = (("model", "whisper"), ("prompt", "file_id: [1]"), ("include[]", "logprobs"))
    more = (("metadata[file_id]", "f"), ("chunking_strategy", '{"type": "server_vad"}'))
    for tenant in ("a", "b", DEFAULT):
        forwarded(tenant, form(*fields, *more), FORM)


SAID = msgspec.json.encode({"model": "m", "input": "a & b; c"})
SNEAKED = b'{"model": "m", "x": "&model=pb@1&"}'
UNCLEAR: dict[str, tuple[bytes, tuple[bytes, ...], dict[str, bytes]]] = {
    "no JSON": (b"model=pb%401", (), {}),
    "a form in another character set": (
        form(("model", "pb@1"), charset="utf-7"),
        (FORM + b"; charset=utf-7",),
        {},
    ),
    "a form without a boundary": (form(("model", "pb@1")), (b"multipart/form-data",), {}),
    "JSON that is called a form": (SAID, (FORM,), {}),
    "JSON that is a form in a URL's encoding": (
        SNEAKED,
        (b"application/x-www-form-urlencoded",),
        {},
    ),
    "JSON in another character set": (SAID, (b"application/json; charset=utf-7",), {}),
    "two types": (form(("model", "m")), (FORM, b"multipart/form-data; boundary=y"), {}),
    "compressed": (SAID, (b"application/json",), {"content_encoding": b"gzip"}),
}


@pytest.mark.parametrize("why", UNCLEAR)
def test_what_may_be_read_otherwise_is_refused(why: str) -> None:
    body, types, headers = UNCLEAR[why]
    for tenant in ("a", DEFAULT):
        with pytest.raises(BadRequest, match=r"not known (what it names|which model it names): "):
            forwarded(tenant, body, *types, **headers)


@pytest.mark.parametrize(
    "types",
    [(), (b"application/json",), (b"application/json; charset=utf-8",), (b"text/plain",)],
)
def test_json_is_let_through_whatever_it_is_called(types: tuple[bytes, ...]) -> None:
    forwarded("a", SAID, *types, content_encoding=b"identity")
    forwarded("a", b'{"model":"m"}', b"application/x-www-form-urlencoded")
    forwarded("a", b"", *types)


def called(owners: Owners, tenant: str, content_type: bytes, **fields: Any) -> None:
    request = read_request(msgspec.json.encode(fields))
    check_call(owners, tenant, [(b"Content-Type", content_type)], request)


def test_a_call_is_read_in_one_way_where_something_is_hidden() -> None:
    called(OWNERS, "a", b"application/json", model="pa@1", x="&")
    with pytest.raises(NotServed):
        called(OWNERS, "a", b"application/json", model="pb@1")
    for unclear in (b"application/x-www-form-urlencoded", b"application/json; charset=utf-7"):
        with pytest.raises(BadRequest, match="not known which model"):
            called(OWNERS, "a", unclear, model="m", x="&model=pb@1&")
        called(ALONE, DEFAULT, unclear, model="m", x="&model=pb@1&")


@pytest.mark.parametrize(
    "said",
    [
        b'{"model": "pb@1", "model": "m"}',
        b'{"mod\\u0065l": "pb@1", "model": "m"}',
        b'{"model": "m", "messages": [{"file_id": "f", "file_id": null}]}',
        b'{"model": "m", "messages": [1e400, {"x": {"file_id": "f", "file_id": null}}]}',
    ],
)
def test_a_name_that_comes_twice_is_refused_where_something_is_hidden(said: bytes) -> None:
    request = read_request(said)
    for tenant in ("a", DEFAULT):
        with pytest.raises(BadRequest, match=r"has '(model|file_id)' twice"):
            check_call(OWNERS, tenant, [], request)
        with pytest.raises(BadRequest, match=r"has '(model|file_id)' twice"):
            forwarded(tenant, said)
    check_call(ALONE, DEFAULT, [], request)
    mask = form(("model", "m"), ("mask", '{"file_id": "f", "file_id": null}'))
    with pytest.raises(BadRequest, match="has 'file_id' twice"):
        forwarded("a", mask, FORM)


STEERED: list[dict[str, Any]] = [
    {"fallbacks": ["pb@1"]},
    {"fallbacks": [{"m": ["n", "pb@1"]}, 1e308]},
    {"models": ["m", "pb@1"]},
    {"Model": "pb@1"},
    {"lora_path": "pb@1"},
]


@pytest.mark.parametrize("fields", STEERED)
def test_no_field_names_a_version_of_another_tenant(fields: dict[str, Any]) -> None:
    body = msgspec.json.encode({"model": "m", **fields})
    for tenant in ("a", DEFAULT):
        for said in (body, body.replace(b"1e308", b"1e400")):
            with pytest.raises(NotServed, match="no version 'pb@1'"):
                check_call(OWNERS, tenant, [], read_request(said))
    own = msgspec.json.decode(msgspec.json.encode(fields).replace(b"pb@1", b"pa@1"))
    if "Model" not in fields:
        called(OWNERS, "a", b"application/json", model="m", **own)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"api_base": "http://x"}, "place_not_chosen"),
        ({"extra_body": {"base_url": "http://x"}}, "place_not_chosen"),
        ({"priority": -1}, "priority_not_chosen"),
        ({"Previous_Response_Id": "resp_1"}, "unclear_body"),
    ],
)
def test_a_tenant_steers_no_request_past_the_proxy(fields: dict[str, Any], code: str) -> None:
    called(OWNERS, DEFAULT, b"application/json", model="m", **fields)
    called(ALONE, DEFAULT, b"application/json", model="m", **fields)
    with pytest.raises(BadRequest) as refused:
        called(OWNERS, "a", b"application/json", model="m", **fields)
    assert refused.value.code == code
    [name] = fields
    if not isinstance(fields[name], dict):
        with pytest.raises(BadRequest):
            forwarded("a", form(("model", "m"), (name, str(fields[name]))), FORM)
        with pytest.raises(BadRequest):
            check_query(OWNERS, "a", f"/v1/chat/completions?beta=true&{name}={fields[name]}")


def test_a_query_names_no_version_of_another_tenant() -> None:
    for target in ("/v1/embeddings", "/v1/embeddings?", "/v1/messages?beta=true&model=pa%401"):
        check_query(OWNERS, "a", target)
    for tenant in ("a", DEFAULT):
        with pytest.raises(NotServed, match="no version 'pb@1'"):
            check_query(OWNERS, tenant, "/v1/embeddings?x=1&model=pb%401")
