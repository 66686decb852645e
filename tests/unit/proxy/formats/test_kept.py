"""What names something that a provider keeps is found wherever it stands, and nothing else is."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.door.bodies import check_call
from proxy.errors import BadRequest, NotKept
from proxy.formats.base import ModelRequest, read_request
from proxy.formats.kept import FREE, all_fields, kept_name, refers
from proxy.policies.owners import Owners
from store.tenants import DEFAULT

ALONE = Owners(None)
URL = {"url": "data:image/png;base64,AA=="}


def check(tenant: str, request: ModelRequest) -> None:
    check_call(ALONE, tenant, [], request)


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


NAMING: list[tuple[str, dict[str, Any]]] = [
    ("file_id", user({"type": "file", "file": {"file_id": "file-1"}})),
    ("file_id", user({"type": "image", "source": {"type": "file", "file_id": "file_1"}})),
    ("file_id", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}),
    (
        "file_id",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
    ),
    ("file_id", {"input": [{"type": "computer_call_output", "output": {"file_id": "f"}}]}),
    ("file_id", {"tools": [{"type": "image_generation", "input_image_mask": {"file_id": "f"}}]}),
    ("file_id", {"images": [{"file_id": "f"}]}),
    ("file_ids", {"tools": [{"type": "code_interpreter", "container": {"file_ids": ["f"]}}]}),
    ("container", {"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}),
    ("container", {"container": "container_1"}),
    ("container", {"container": {"id": "container_1"}}),
    ("container_id", {"input": [{"type": "code_interpreter_call", "container_id": "cntr_1"}]}),
    ("vector_store_ids", {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}),
    ("skill_id", {"container": {"skills": [{"type": "custom", "skill_id": "skill_1"}]}}),
    ("tunnel_id", {"tools": [{"type": "mcp", "tunnel_id": "t"}]}),
    ("prompt", {"prompt": {"id": "pmpt_1", "version": "2"}}),
    ("prompt", {"session": {"prompt": {"id": "pmpt_1"}}}),
    ("audio", {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}),
    ("voice", {"voice": {"id": "voice_1"}}),
    ("uuid", user({"type": "image_url", "image_url": None, "uuid": "my-picture"})),
    ("uuid", user({"type": "image_url", "image_url": URL, "uuid": ""})),
    ("kv_transfer_params", {"kv_transfer_params": {"do_remote_prefill": True}}),
    ("ec_transfer_params", {"ec_transfer_params": {"do_remote_encode": True}}),
    ("bootstrap_room", {"bootstrap_room": 7}),
    ("session_params", {"session_params": {"id": "s", "rid": "r"}}),
    ("File_ID", user({"type": "file", "file": {"File_ID": "file-1"}})),
    ("vector_\u017ftore_ids", {"tools": [{"vector_\u017ftore_ids": ["vs_1"]}]}),
]
SCHEMA = {"type": "object", "properties": {"file_id": {"type": "string"}}, "required": ["file_id"]}
HARMLESS: list[dict[str, Any]] = [
    user({"type": "image_url", "image_url": URL}, {"type": "text", "text": "file_id"}),
    user({"type": "file", "file": {"file_data": "AA==", "file_id": None}}),
    {"tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]},
    {"tools": [{"name": "read", "input_schema": SCHEMA | {"default": {"file_id": "f"}}}]},
    user({"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"file_id": "f"}}),
    {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    {"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}},
    {"prompt": "q", "voice": "alloy", "audio": {"voice": "alloy", "format": "wav"}},
    {"prompt": [1, 2], "metadata": {"file_id": "f", "uuid": "u"}, "kv_transfer_params": None},
    {"messages": [{"role": "user", "content": "q", "uuid": "u"}]},
]


@pytest.mark.parametrize(("name", "fields"), NAMING)
def test_what_is_kept_is_found(name: str, fields: dict[str, Any]) -> None:
    assert kept_name(fields) == name


@pytest.mark.parametrize("fields", HARMLESS)
def test_what_says_all_itself_names_nothing(fields: dict[str, Any]) -> None:
    assert kept_name(fields) is None


names = st.text(st.characters(codec="ascii", min_codepoint=97), max_size=4)


@given(st.lists(names | st.none(), max_size=6), st.sampled_from(NAMING))
def test_it_is_found_at_any_depth(path: list[str | None], case: tuple[str, dict[str, Any]]) -> None:
    value: Any = case[1]
    for name in path:
        value = [1, value, "x"] if name is None else {name: value, "after": 1}
    free = any(name in FREE or name == "input" for name in path)
    assert free or kept_name({"messages": value}) == case[0]


ITEMS: list[tuple[dict[str, Any], bool]] = [
    ({"type": "item_reference", "id": "msg_1"}, True),
    ({"id": "msg_1"}, True),
    ({"type": None, "id": "msg_1"}, True),
    ({"type": "reasoning", "id": "rs_1", "summary": []}, True),
    ({"type": "image_generation_call", "id": "ig_1", "result": None}, True),
    ({"role": "assistant", "id": "msg_1", "content": "yes"}, False),
    ({"type": "reasoning", "id": "rs_1", "encrypted_content": "AA=="}, False),
    ({"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text"}]}, False),
    ({"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}"}, False),
    ({"type": "image_generation_call", "id": "ig_1", "result": "AA=="}, False),
    ({"type": ["reasoning"], "id": "x"}, False),
]


@pytest.mark.parametrize(("item", "is_one"), ITEMS)
def test_items_that_are_only_named(item: dict[str, Any], is_one: bool) -> None:
    assert refers([{"role": "user", "content": "q"}, item]) is is_one
    assert not refers("q")


def test_nothing_hides_behind_a_number_that_is_hard_to_read() -> None:
    for name, fields in NAMING:
        body = msgspec.json.encode({"model": "m", "list": [fields]})
        request = read_request(body.replace(b'"list":[', b'"list":[1e400,'))
        assert isinstance(request.fields["list"], str)
        assert kept_name(all_fields(request)) == name
        with pytest.raises(NotKept, match="kept for all tenants"):
            check("a", request)
        check(DEFAULT, request)
    check("a", read_request(b'{"messages": [1e400], "file_id": null}'))


def test_numbers_that_nobody_can_read_are_refused() -> None:
    request = read_request(b'{"messages": [%s, 1e400]}' % (b"9" * 5000))
    with pytest.raises(BadRequest, match="fewer digits"):
        check("a", request)


def test_what_is_no_object_names_nothing() -> None:
    for body in (b"", b"[1]", b"--x\r\n", b'"file_id"'):
        assert kept_name(all_fields(read_request(body))) is None
