"""What one of several tenants may send, and what it must not name."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from time import thread_time
from typing import Any, get_args

import msgspec
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import BadRequest, NotServed
from proxy.formats.base import ModelRequest, read_request
from proxy.http.wire import Headers
from proxy.policies.owners import Owners
from proxy.tenants import (
    ALLOWED_MEMBERS,
    CONVERSATION_FIELDS,
    FREE_FORM_FIELDS,
    OPTION_FIELDS,
    REFERENCE_NAMES,
    REFERENCES,
    allowed_fields,
    check_call,
    check_forwarded,
    check_headers,
    check_query,
)
from store.policy_table import parse_policies
from store.tenants import DEFAULT
from tests.support.proxy.keys import CODEX, SECOND_TURN
from tests.support.recordings import recordings

OWNERS = Owners(
    parse_policies(
        '[[policy]]\nname = "pa"\nbase = "m"\ntenant = "a"\n'
        '[[policy]]\nname = "pb"\nbase = "m"\ntenant = "b"\n',
        "p.toml",
    )
)
ALONE = Owners(None)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CALLS = (CHAT, RESPONSES, MESSAGES, "/v1/completions")
PATHS = (*CALLS, "/v1/embeddings", "/tokenize", "/v1/audio/speech", "/v1/images/edits")
FORM = b"multipart/form-data; boundary=x"
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n\xff\x00\r\n'
URL = {"url": "data:image/png;base64,AA=="}


def called(
    tenant: str, path: str, fields: dict[str, Any], owners: Owners = OWNERS, kind: bytes = b""
) -> tuple[ModelRequest, str | None]:
    request = read_request(msgspec.json.encode({"model": "m", **fields}))
    return check_call(owners, tenant, path, [(b"Content-Type", kind)] if kind else [], request)


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def item(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "q"}, *parts]}


CONTENT = "messages[0].content[0]."


def said_back(**fields: Any) -> dict[str, Any]:
    """A turn in which a client of LiteLLM sends a reply's other fields back."""
    return {"messages": [{"role": "assistant", "provider_specific_fields": fields}]}


# What tenants may not send: the path, the request's fields, and the name that the error has.
# Parts of a user's content, items and tools come first, with the name within them.
CONTENTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"type": "file", "file": {"file_id": "f"}}, "file.file_id"),
    (CHAT, {"type": "file", "file": {"File_ID": "f"}}, "file.File_ID"),
    (CHAT, {"type": "image_url", "image_url": None, "uuid": "my-picture"}, "uuid"),
    (MESSAGES, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.file_id"),
    (MESSAGES, {"type": "container_upload", "file_id": "f"}, "file_id"),
]
ITEMS: list[tuple[Any, str]] = [
    ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, ".content[0].file_id"),
    ({"type": "computer_call_output", "output": {"file_id": "f"}}, ".output.file_id"),
    ({"type": "code_interpreter_call", "container_id": "cntr_1"}, ".container_id"),
    # These only name what the provider keeps.
    ({"type": "item_reference", "id": "msg_1"}, ""),
    ({"id": "msg_1"}, ""),
    ({"type": None, "id": "msg_1"}, ""),
    ({"type": "reasoning", "id": "rs_1", "summary": []}, ""),
    ({"type": "image_generation_call", "id": "ig_1", "result": None}, ""),
    ({"role": None, "id": "msg_1"}, ""),
    ({"role": "", "id": "msg_1"}, ""),
    ([{"type": "item_reference", "id": "msg_1"}], ""),
    ([{"id": "msg_1"}], ""),
    ({"type": "nobody_knows", "id": "x"}, ""),
    ({"type": ["reasoning"], "id": "x"}, ""),
]
TOOLS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "image_generation", "input_image_mask": {"file_id": "f"}},
        "input_image_mask.file_id",
    ),
    ({"type": "code_interpreter", "container": {"file_ids": ["f"]}}, "container.file_ids"),
    ({"type": "code_interpreter", "container": "cntr_1"}, "container"),
    ({"type": "file_search", "vector_store_ids": ["vs_1"]}, "vector_store_ids"),
    ({"type": "mcp", "tunnel_id": "t"}, "tunnel_id"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, user(part), f"messages[0].content[0].{name}") for path, part, name in CONTENTS),
    *((RESPONSES, item(one), f"input[1]{name}") for one, name in ITEMS),
    *((RESPONSES, {"tools": [tool]}, f"tools[0].{name}") for tool, name in TOOLS),
    # Somewhere else, with another key, before others, under another's id, from another's cache.
    *((CHAT, {name: "x"}, name) for name in ("api_base", "base_url", "api_key", "API_KEY")),
    *((CHAT, {name: "x"}, name) for name in ("aws_role_name", "vertex_credentials", "rid")),
    *(
        (CHAT, {name: {"a": 1}}, name)
        for name in ("user_config", "extra_headers", "litellm_params")
    ),
    *((CHAT, {"priority": value}, "priority") for value in (-1, 0, "1", True)),
    *((path, {"priority": -1}, "priority") for path in PATHS),
    *((path, {"cache_salt": "x"}, "cache_salt") for path in PATHS),
    *((path, {"request_id": "resp_1"}, "request_id") for path in PATHS),
    (CHAT, {"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    (CHAT, {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    (CHAT, {"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
    (CHAT, {"fallbacks": ["m"]}, "fallbacks"),
    (CHAT, {"Model": "m"}, "Model"),
    (CHAT, {"me\u017f\u017fages": []}, "me\u017f\u017fages"),
    (CHAT, {"metadata": {"langfuse_host": "http://x"}}, "metadata.langfuse_host"),
    (CHAT, {"litellm_metadata": {"langsmith_api_key": "k"}}, "litellm_metadata"),
    (CHAT, {"session_id": "s"}, "session_id"),
    # SDKs merge `extra_body` into the request; some gateways do so with a literal one.
    *(
        (RESPONSES, {"extra_body": extra}, "extra_body")
        for extra in (
            {"previous_response_id": "resp_1"},
            {"conversation": "conv_1"},
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            {"request_id": "resp_1"},
            {"api_base": "http://x"},
            {},
        )
    ),
    # What a provider keeps under one account for all tenants.
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"Previous_Response_Id": "resp_1"}, "Previous_Response_Id"),
    (RESPONSES, {"prompt": {"id": "pmpt_1", "version": "2"}}, "prompt"),
    (MESSAGES, {"container": "container_1"}, "container"),
    (MESSAGES, {"container": {"skills": [{"type": "custom", "skill_id": "s"}]}}, "container"),
    (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio.id"),
    (CHAT, said_back(file_id="f"), "messages[0].provider_specific_fields.file_id"),
    (CHAT, said_back(container="c"), "messages[0].provider_specific_fields.container"),
    (CHAT, said_back(id="c"), "messages[0].provider_specific_fields.id"),
    (CHAT, said_back(ID="c"), "messages[0].provider_specific_fields.ID"),
    (CHAT, said_back(x=[{"file_ids": []}]), "messages[0].provider_specific_fields.x[0].file_ids"),
    (CHAT, said_back(extra_body={}), "messages[0].provider_specific_fields.extra_body"),
    (CHAT, user({"type": "image_embeds", "image_embeds": "AA=="}), CONTENT + "image_embeds"),
    (CHAT, user({"prompt": {"id": "pmpt_1"}}), CONTENT + "prompt"),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "skills": []}]}, "system[0].skills"),
    (RESPONSES, {"previous_response_id": {"id": "resp_1"}}, "previous_response_id.id"),
    (CHAT, {"previous_response_id": "resp_1"}, "previous_response_id"),
    # Readers that take names in any letters would find a reference.
    (RESPONSES, item({"type": "item_reference", "Id": "msg_1"}), "input[1].Id"),
    (RESPONSES, item({"role": "user", "Type": "item_reference", "id": "m"}), "input[1].Type"),
    (CHAT, user({"type": "text", "Image_URL": "x"}), CONTENT + "Image_URL"),
    (CHAT, user({"\ufb01le_id": "f"}), CONTENT + "\ufb01le_id"),
    (CHAT, {"vector_store_ids": ["vs_1"]}, "vector_store_ids"),
    (CHAT, {"metadata": {"x-Api-Base": "http://x"}}, "metadata.x-Api-Base"),
    ("/v1/audio/speech", {"input": "q", "voice": {"id": "voice_1"}}, "voice.id"),
    ("/v1/images/edits", {"prompt": "q", "images": [{"file_id": "f"}]}, "images[0].file_id"),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_tenants_request_field_off_the_allow_list_is_refused_by_its_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    called(DEFAULT, path, fields)
    called(DEFAULT, path, fields, owners=ALONE)
    # Where only the default tenant has policies, other tenants are held to the list, too.
    for owners in (OWNERS, ALONE):
        with pytest.raises(BadRequest) as refused:
            called("a", path, fields, owners=owners)
        error = refused.value
        assert (error.status, error.param) == (400, param)
        assert error.message.startswith(f"{param} is not among the fields that tenants may send")
        assert error.message.endswith(
            ("leave it out", "itself", "beside the others", "that `include` asks for")
        )


# Unknown names under which a server or a gateway may find an object or a place: none is passed on.
HIDDEN = "kept-by-another"
LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"client_metadata": {"file_id": HIDDEN}}, "client_metadata"),
    (CHAT, {"provider_specific_fields": {"container": HIDDEN}}, "provider_specific_fields"),
    (CHAT, {"files": [HIDDEN]}, "files"),
    (CHAT, {"cachedContent": HIDDEN}, "cachedContent"),
    (CHAT, {"guardrailConfig": {"guardrailIdentifier": HIDDEN}}, "guardrailConfig"),
    (CHAT, {"data_sources": [{"parameters": {"index_name": HIDDEN}}]}, "data_sources"),
    (CHAT, {"service_tier": HIDDEN}, "service_tier"),
    (CHAT, {"custom_logit_processor": HIDDEN}, "custom_logit_processor"),
    (CHAT, {"mm_payload": HIDDEN}, "mm_payload"),
    (RESPONSES, {"previous_input_messages": [HIDDEN]}, "previous_input_messages"),
    (CHAT, user({"type": "input_image", "fileId": HIDDEN}), "messages.content.fileId"),
    (CHAT, user({"provider_specific_fields": {"Object_IDs": [HIDDEN]}}), "messages.content.p"),
    (CHAT, user({"latent_embeds": HIDDEN}), "messages.content.latent_embeds"),
    (CHAT, user({"file_id\0": HIDDEN, "file_ids[]": HIDDEN}), "messages.content.file_id"),
    (CHAT, user({"image_uri ": f"file:///{HIDDEN}"}), "messages.content.image_uri "),
    (CHAT, user({"current_url": f"http://localhost/{HIDDEN}"}), "messages.content.current_url"),
    (CHAT, user({"first_image": f"file:///{HIDDEN}"}), "messages.content.first_image"),
    (CHAT, {"tools": [{"vertexAiSearch": {"datastore": HIDDEN}}]}, "tools.vertexAiSearch"),
    (CHAT, {"tools": [{"type": "x", "function": {"store": HIDDEN}}]}, "tools.function.store"),
    (
        CHAT,
        {"response_format": {"type": "json_object", "corpus": HIDDEN}},
        "response_format.corpus",
    ),
    (RESPONSES, item({"type": "x", "tools": [{"corpora": [HIDDEN]}]}), "input.tools.corpora"),
    (RESPONSES, item({"type": "x", "environment": {"snapshot": HIDDEN}}), "input.environment.sn"),
]


@pytest.mark.parametrize(("path", "fields", "warned"), LEFT_OUT)
def test_unknown_field_of_a_tenants_request_is_left_out_with_a_warning(
    path: str, fields: dict[str, Any], warned: str
) -> None:
    passed, warning = called("a", path, {"temperature": 0.25, **fields})
    assert HIDDEN.encode() not in passed.body
    assert msgspec.json.decode(passed.body) == {
        name: passed.fields[name] for name in passed.parsed or {}
    }
    assert (passed.model, passed.fields["temperature"]) == ("m", 0.25)
    assert warning is not None
    assert f"'{warned}" in warning
    untouched, warning = called(DEFAULT, path, fields)
    assert (HIDDEN.encode() in untouched.body, warning) == (True, None)


def test_body_is_passed_on_unchanged_except_for_left_out_fields() -> None:
    said = (
        b'{"model":"m", "messages":[{"role":"user","content":"q","n":1e400}],'
        b'"tools":[{"type":"function","new":{},"function":{"name":"f","parameters":{"n":'
        b'123456789012345678901234567890}}}],"new":1,"new\\r\\nHost":[{"x":1}]}'
    )
    passed, warning = check_call(OWNERS, "a", CHAT, [], read_request(said))
    messages = said[said.index(b"[") : said.index(b'],"tools"') + 1]
    assert b'"messages":%b,' % messages in passed.body
    sent = json.loads(passed.body)
    assert sent.keys() == {"model", "messages", "tools"}
    tool = json.loads(said)["tools"][0]
    assert sent["tools"] == [{one: tool[one] for one in ("type", "function")}]
    assert warning is not None
    assert warning.isprintable()
    assert len(called("a", CHAT, {f"new{n}": n for n in range(999)})[1] or "") < 500
    with pytest.raises(BadRequest, match="cannot be read"):
        check_call(
            OWNERS, "a", CHAT, [], read_request(b'{"tools": [{"x": 1, "parameters": 1e400}]}')
        )


# What real clients send beside the fields of the APIs: the fields, and those that are left out.
CLIENTS: list[tuple[str, dict[str, Any], set[str]]] = [
    (RESPONSES, CODEX, {"client_metadata"}),
    (CHAT, SECOND_TURN, set()),
]


@pytest.mark.parametrize(("path", "fields", "left_out"), CLIENTS)
def test_only_unlisted_fields_of_a_clients_request_are_left_out_with_a_warning(
    path: str, fields: dict[str, Any], left_out: set[str]
) -> None:
    passed, warning = called("a", path, fields)
    said = {"model": "m", **fields}
    assert json.loads(passed.body) == {one: said[one] for one in said if one not in left_out}
    assert (warning is None) is (not left_out)


INSIDE = [
    *("file:///etc/passwd", "FILE:/etc/passwd", "http://169.254.169.254/latest", "http:/127.0.0.1"),
    *(
        "https://localhost/x",
        "http://vllm:8000/x",
        "http://10.0.0.1/x",
        "http://[::1]/",
        "http://[fd00::1]",
    ),
    *("http://0x7f.1/", "http://2130706433/", "http://017700000001", "http://100.64.0.1"),
    *("http://a@192.168.0.1:80/x", "http://[::ffff:10.0.0.1]/", "http://metadata.google.internal"),
    *(
        "http://8.8.8.8\\@127.0.0.1/",
        " http://127.0.0.1",
        "ht\ntp://127.0.0.1",
        "http://127.0.0.1.",
    ),
    *("/srv/pictures/other.png", "other.png", "//127.0.0.1/x", "s3://bucket/x", "gs://bucket/x"),
    *("http://１２７.0.0.1/", "http://%31%32%37.0.0.1/", "http:///x", "http://[::1"),
]


@pytest.mark.parametrize("url", INSIDE)
def test_media_url_within_the_servers_network_is_refused(url: str) -> None:
    for path, fields, param in (
        (CHAT, user({"type": "image_url", "image_url": {"url": url}}), "image_url.url"),
        (CHAT, user({"type": "video_url", "video_url": {"url": url}}), "video_url.url"),
        (RESPONSES, item({"role": "user", "content": [{"image_url": url}]}), "image_url"),
        (MESSAGES, user({"type": "image", "source": {"type": "url", "url": url}}), "source.url"),
        (CHAT, {"tools": [{"type": "mcp", "server_url": url}]}, "tools[0].server_url"),
        (CHAT, user({"provider_specific_fields": {"file_url": [url]}}), "fields.file_url[0]"),
    ):
        called(DEFAULT, path, fields)
        with pytest.raises(BadRequest, match="public address") as refused:
            called("a", path, fields)
        assert (refused.value.param or "").endswith(param)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://bucket/x", "http://10.0.0.1/x"])
def test_media_url_in_place_of_inline_data_is_refused(url: str) -> None:
    # LiteLLM fetches both for some providers.
    for part in ({"file": {"file_data": url}}, {"input_audio": {"data": url}}):
        with pytest.raises(BadRequest, match="public address"):
            called("a", CHAT, user(part))
    called("a", CHAT, user({"file": {"file_data": "data:,gs://x"}}, {"input_audio": {"data": "A"}}))


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png?u=http://127.0.0.1", "HTTP://8.8.8.8:80/x", "data:,file:x"]
)
def test_public_media_url_is_let_through(url: str) -> None:
    # It raises for what is refused.
    called("a", CHAT, user({"type": "image_url", "image_url": {"url": url}}))


SCHEMA = {"type": "object", "properties": {"file_id": {"type": "string"}}, "required": ["file_id"]}
ALLOWED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, user({"type": "image_url", "image_url": URL}, {"type": "text", "text": "file_id"})),
    (CHAT, user({"type": "file", "file": {"file_data": "AA==", "file_id": None}})),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}),
    (CHAT, {"metadata": {"host": "build-7", "session_id": "s", "run": "9"}, "api_base": None}),
    (CHAT, {"audio": {"voice": "alloy", "format": "wav"}, "kv_transfer_params": None}),
    (CHAT, {"stream_options": {"include_usage": True}, "logit_bias": {"1": 2}, "min_p": 0.1}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}]}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA | {"default": {"file_id": "f"}}}]}),
    (MESSAGES, user({"type": "tool_use", "id": "t", "name": "f", "input": {"file_id": "f"}})),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking", "keep": "all"}]}}),
    (MESSAGES, {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}),
    (RESPONSES, {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}),
    (RESPONSES, {"tools": [{"type": "mcp", "server_url": "https://x.org", "headers": {"a": "b"}}]}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    (RESPONSES, {"input": "q", "previous_response_id": "resp_1", "store": False}),
    (RESPONSES, item({"role": "assistant", "id": "msg_1", "content": "yes"})),
    (RESPONSES, item({"type": "reasoning", "id": "rs_1", "encrypted_content": "AA=="})),
    (RESPONSES, item({"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text"}]})),
    (RESPONSES, item({"type": "function_call", "id": "fc", "name": "f", "arguments": "{}"})),
    (RESPONSES, item({"type": "image_generation_call", "id": "ig_1", "result": "AA=="})),
    ("/v1/completions", {"prompt": [1, 2]}),
    ("/v1/embeddings", {"input": ["q"], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "q", "add_special_tokens": False}),
]


@pytest.mark.parametrize(("path", "fields"), ALLOWED)
def test_self_contained_request_is_let_through(path: str, fields: dict[str, Any]) -> None:
    for tenant in ("a", DEFAULT):
        passed, warning = called(tenant, path, fields)
        assert (passed.body, warning) == (msgspec.json.encode({"model": "m", **fields}), None)


def recorded_requests() -> Iterator[tuple[str, str, bytes]]:
    """Requests of real clients: the path, the client or the kind, and the body."""
    paths = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
    clients = json.loads(Path("benchmarks/recordings/stitching.json").read_text())
    for client, recording in clients.items():
        for run, calls in recording["runs"].items():
            for call in calls:
                yield paths[call["dialect"]], f"{client}: {run}", json.dumps(call["body"]).encode()
    for api in ("messages", "responses"):
        for name, exchange in recordings(api).items():
            yield paths[api], name, exchange["request"].encode()


def test_recorded_requests_of_real_clients_are_passed_on_unchanged() -> None:
    requests = list(recorded_requests())
    assert len(requests) > 50
    for path, name, body in requests:
        try:
            passed, warning = check_call(OWNERS, "a", path, [], read_request(body))
        except BadRequest as error:
            pytest.fail(f"{name}: {error.message}")
        assert (passed.body, warning) == (body, None), name


SDK_REQUESTS = {
    CHAT: "openai.types.chat.completion_create_params:CompletionCreateParamsNonStreaming",
    "/v1/completions": "openai.types.completion_create_params:CompletionCreateParamsNonStreaming",
    RESPONSES: "openai.types.responses.response_create_params:ResponseCreateParamsNonStreaming",
    MESSAGES: "anthropic.types.beta.message_create_params:MessageCreateParamsNonStreaming",
    "/v1/embeddings": "openai.types.embedding_create_params:EmbeddingCreateParams",
    "/v1/moderations": "openai.types.moderation_create_params:ModerationCreateParams",
    "/v1/audio/speech": "openai.types.audio.speech_create_params:SpeechCreateParams",
}
# Fields of the SDKs that tenants may not send: they name what is kept for all tenants, what a
# request costs or comes before, or only tell of features that no tenant can have.
WITHHELD = {
    *("conversation", "prompt", "container", "thread", "service_tier", "speed", "inference_geo"),
    *("workspace_id", "user_profile_id", "diagnostics", "access_programs", "moderation"),
    *("fallbacks", "fallback_credit_token", "billing_policy", "betas", "compaction", "image"),
}
WITHHELD_MEMBERS = {
    *("file_id", "file_ids", "container_id", "vector_store_ids", "skills", "skill_id", "tunnel_id"),
    *("comparison_response_id", "previous_message_id", "download_id", "bill_to", "token"),
    *("variables", "domain_secrets", "network_policy", "ranking_options", "fingerprint", "prewarm"),
    *("block_binding", "caching", "prefix_mismatch_behavior", "use_cache"),
}


def typed_names(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names in a TypedDict, each after its path; free content is left out."""
    if typing_extensions.is_typeddict(kind):
        for name, inner in typing_extensions.get_type_hints(kind).items():
            yield path, name
            if (
                name not in FREE_FORM_FIELDS
                and name not in path
                and name not in WITHHELD_MEMBERS | WITHHELD
            ):
                yield from typed_names(inner, (*path, name))
        return
    for inner in get_args(kind):
        yield from typed_names(inner, path)


@pytest.mark.parametrize("path", SDK_REQUESTS)
def test_every_request_field_of_the_sdks_is_passed_on_or_listed_as_withheld(path: str) -> None:
    module, _, name = SDK_REQUESTS[path].partition(":")
    top, options, said = set(), set(), set()
    for within, field in typed_names(getattr(importlib.import_module(module), name)):
        is_talk = within and within[0] in CONVERSATION_FIELDS and OPTION_FIELDS.isdisjoint(within)
        (said if is_talk else options if within else top).add(field)
    assert top - allowed_fields(path) - WITHHELD == set()
    assert options - ALLOWED_MEMBERS - FREE_FORM_FIELDS - WITHHELD_MEMBERS - WITHHELD == set()
    withheld = {one for one in said if REFERENCE_NAMES.fullmatch(one) or one in REFERENCES}
    assert withheld - ALLOWED_MEMBERS - FREE_FORM_FIELDS - WITHHELD_MEMBERS - WITHHELD == set()
    assert not WITHHELD_MEMBERS & (ALLOWED_MEMBERS | FREE_FORM_FIELDS)


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [{"tool": value}]
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"langfuse" * 100_000: "x"}, "langfuse" * 100_000: "x"},
        {"messages": [{"x" * 1_000_000 + "idx": 1, "url" * 300_000 + "x": "x:"}]},
        {"tools": nested({f"new{number}": 1 for number in range(100_000)}, depth=40)},
    ],
)
def test_check_of_a_tenants_request_takes_time_linear_in_its_body(fields: dict[str, Any]) -> None:
    # Time of this thread alone, so that a busy machine does not count.
    begun = thread_time()
    called("a", CHAT, fields)
    assert thread_time() - begun < 10


names = st.text(st.characters(codec="ascii", min_codepoint=97), max_size=4)


@given(st.lists(names | st.sampled_from(sorted(ALLOWED_MEMBERS)) | st.none(), max_size=6))
def test_request_with_a_file_id_at_any_depth_is_refused_or_loses_it(path: list[str | None]) -> None:
    value: Any = {"file_id": "file-1"}
    for name in path:
        value = [1, value, "x"] if name is None else {"url": 1, name: value}
    # A tool's arguments, an object, are the client's own, like the values of `FREE_FORM_FIELDS`.
    if "input" not in path and FREE_FORM_FIELDS.isdisjoint(path):
        try:
            passed, _ = called("a", CHAT, {"messages": value})
        except BadRequest:
            return
        # It stood in a member that is left out.
        assert b"file-1" not in passed.body


def test_forbidden_field_behind_a_number_that_python_cannot_hold_is_refused() -> None:
    for body in (
        b'{"messages": [1e400, {"role": "user", "content": [{"file_id": "f"}]}]}',
        b'{"messages": [1e400], "fallbacks": [1e400, "pb@1"]}',
    ):
        with pytest.raises(BadRequest):
            check_call(OWNERS, "a", CHAT, [], read_request(body))
    check_call(OWNERS, "a", CHAT, [], read_request(b'{"messages": [1e400], "file_id": null}'))
    with pytest.raises(BadRequest, match="fewer digits"):
        check_call(
            OWNERS, "a", CHAT, [], read_request(b'{"messages": [%s, 1e400]}' % (b"9" * 5000))
        )


NAMING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "pb@1"}),
    (CHAT, {"model": ["pb@1"]}),
    (CHAT, {"fallbacks": ["pb@1"]}),
    (CHAT, {"fallbacks": [{"m": ["n", "pb@1"]}, 1e308]}),
    (CHAT, {"models": ["m", "pb@1"], "route": "fallback"}),
    (CHAT, {"plugins": [{"id": "fusion", "model": "pb@1"}]}),
    (CHAT, {"lora_path": "pb@1"}),
    (CHAT, {"extra_body": {"anything": {"pb@1": 1}}}),
    (RESPONSES, {"tools": [{"type": "image_generation", "model": "pb@1"}]}),
]


@pytest.mark.parametrize(("path", "fields"), NAMING)
def test_no_request_field_can_name_another_tenants_version(
    path: str, fields: dict[str, Any]
) -> None:
    body = msgspec.json.encode(fields)
    for said in (body, body.replace(b"1e308", b"1e400")):
        with pytest.raises(NotServed, match="no version 'pb@1'"):
            check_call(OWNERS, DEFAULT, path, [], read_request(said))
        with pytest.raises(BadRequest):
            check_call(OWNERS, "a", path, [], read_request(said))
        check_call(ALONE, DEFAULT, path, [], read_request(said))
    if "model" in fields or "tools" in fields:
        own = msgspec.json.decode(body.replace(b"pb@1", b"pa@1"))
        called("a", path, own)


def test_texts_and_ids_in_a_request_are_not_taken_for_version_names() -> None:
    fields = {"user": "me@1", "metadata": {"a": "x@1"}, "stop": ["x@1"], "messages": ["x@1"]}
    tools = [{"type": "function", "function": {"name": "f", "description": "x@1"}}]
    called("a", CHAT, fields | {"tools": tools, "n": 1})
    called(DEFAULT, CHAT, fields | {"tools": tools, "n": 1, "session_id": "s@1", "query": "x@1"})


# Bodies that readers may take in different ways.


def form(*pairs: tuple[str, str], charset: str = "utf-8") -> bytes:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        % (name.encode(), value.encode(charset))
        for name, value in pairs
    ]
    return b"".join(parts) + FILE + b"--x--\r\n"


def forwarded(
    tenant: str, body: bytes, *types: bytes, path: str = "/v1/images/edits", **headers: bytes
) -> None:
    given: Headers = [(b"Content-Type", one) for one in types]
    given += [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    check_forwarded(OWNERS, tenant, path, given, read_request(body))


@pytest.mark.parametrize("model", ["pb@1", " pb@1", "pb@1\r\n", "pb@999", "nobody@1"])
@pytest.mark.parametrize("name", ["model", "prompt", "svg[model]", "anything"])
def test_no_form_field_can_name_another_tenants_version(model: str, name: str) -> None:
    forwarded("a", form(("model", "pa@1"), ("prompt", "write to me@home")), FORM)
    for tenant in ("a", DEFAULT):
        with pytest.raises(NotServed, match="no version"):
            forwarded(tenant, form(("model", "m"), (name, model)), FORM)


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
        ("prompt", '{"id": "pmpt_1"}'),
        ("priority", "-1"),
        ("api_base", "http://x"),
        ("vllm_xargs", '{"kv_transfer_params": {"do_remote_prefill": true}}'),
    ],
)
def test_tenants_form_field_off_the_allow_list_is_refused(name: str, value: str) -> None:
    body = form(("model", "m"), (name, value))
    forwarded(DEFAULT, body, FORM)
    with pytest.raises(BadRequest, match="tenants may send"):
        forwarded("a", body, FORM)


def test_self_contained_form_is_let_through() -> None:
    fields = (("model", "whisper"), ("prompt", "file_id: [1]"), ("include[]", "logprobs"))
    more = (("timestamp_granularities[]", "word"), ("chunking_strategy", '{"type": "server_vad"}'))
    for tenant in ("a", "b", DEFAULT):
        forwarded(tenant, form(*fields, *more), FORM, path="/v1/audio/transcriptions")


SAID = msgspec.json.encode({"model": "m", "prompt": "a & b; c"})
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


@pytest.mark.parametrize("kind", UNCLEAR)
def test_ambiguous_request_body_is_refused(kind: str) -> None:
    body, types, headers = UNCLEAR[kind]
    for tenant in ("a", DEFAULT):
        with pytest.raises(BadRequest, match=r"not known which (objects|model) it names: "):
            forwarded(tenant, body, *types, **headers)


@pytest.mark.parametrize(
    "types",
    [(), (b"application/json",), (b"application/json; charset=utf-8",), (b"text/plain",)],
)
def test_json_body_is_let_through_with_any_content_type(types: tuple[bytes, ...]) -> None:
    forwarded("a", SAID, *types, content_encoding=b"identity")
    forwarded("a", b'{"model":"m"}', b"application/x-www-form-urlencoded")
    forwarded("a", b"", *types)


def test_call_with_an_ambiguous_body_is_refused_if_versions_are_hidden() -> None:
    called("a", CHAT, {"model": "pa@1", "user": "&"}, kind=b"application/json")
    for unclear in (b"application/x-www-form-urlencoded", b"application/json; charset=utf-7"):
        sneaked = {"model": "m", "user": "&model=pb@1&"}
        with pytest.raises(BadRequest, match="not known which model"):
            called("a", CHAT, sneaked, kind=unclear)
        called(DEFAULT, CHAT, sneaked, owners=ALONE, kind=unclear)
    with pytest.raises(BadRequest, match="not a JSON object"):
        check_call(OWNERS, "a", CHAT, [(b"Content-Type", FORM)], read_request(form(("model", "m"))))


@pytest.mark.parametrize(
    "said",
    [
        b'{"model": "pb@1", "model": "m"}',
        b'{"mod\\u0065l": "pb@1", "model": "m"}',
        b'{"model": "m", "messages": [{"file_id": "f", "file_id": null}]}',
        b'{"model": "m", "messages": [1e400, {"x": {"file_id": "f", "file_id": null}}]}',
    ],
)
def test_request_with_a_repeated_json_name_is_refused_if_versions_are_hidden(said: bytes) -> None:
    request = read_request(said)
    for tenant in ("a", DEFAULT):
        with pytest.raises(BadRequest, match=r"has '(model|file_id)' twice"):
            check_call(OWNERS, tenant, CHAT, [], request)
        with pytest.raises(BadRequest, match=r"has '(model|file_id)' twice"):
            forwarded(tenant, said)
    check_call(ALONE, DEFAULT, CHAT, [], request)
    mask = form(("model", "m"), ("mask", '{"file_id": "f", "file_id": null}'))
    with pytest.raises(BadRequest, match="has 'file_id' twice"):
        forwarded("a", mask, FORM)


def test_url_query_may_have_only_listed_names_and_no_version_of_another_tenant() -> None:
    for target in ("/v1/embeddings", "/v1/embeddings?", "/v1/messages?beta=true&model=pa%401"):
        check_query(OWNERS, "a", target)
    for tenant in ("a", DEFAULT):
        with pytest.raises(NotServed, match="no version 'pb@1'"):
            check_query(OWNERS, tenant, "/v1/embeddings?beta=1&model=pb%401")
    with pytest.raises(BadRequest, match="priority is not among"):
        check_query(OWNERS, "a", "/v1/chat/completions?beta=true&priority=-1")
    check_query(OWNERS, DEFAULT, "/v1/chat/completions?beta=true&priority=-1")


def test_no_forwarded_header_can_name_another_tenants_version() -> None:
    steering: Headers = [(b"X-Gateway-Model-Name-Rewrite", b"pb@1"), (b"Cookie", b"a=b")]
    check_headers(OWNERS, "a", steering)
    check_headers(OWNERS, DEFAULT, [(b"User-Agent", b"agent@1")])
    check_headers(ALONE, DEFAULT, steering)
    with pytest.raises(NotServed, match="no version 'pb@1'"):
        check_headers(OWNERS, DEFAULT, steering)
