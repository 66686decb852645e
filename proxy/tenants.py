"""Keep tenants apart in what their requests name.

One model server, and one account at a provider, serve all tenants. A request could name another
tenant's version, file, response or cache, or send itself to another address. So a tenant may send
the fields that are listed here, and no other. The default tenant owns the account and may send any
field, but must not name another tenant's version, nor go on from another tenant's response.

A body must mean the same to whoever reads it: where anything is hidden from its sender, a body that
servers may read in different ways is refused (docs/decisions/068-tenants.md).
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from socket import inet_aton, inet_ntoa
from typing import Any, Final
from urllib.parse import parse_qsl

from proxy.errors import BadRequest, NotContinued, NotKnownNow
from proxy.formats.base import ModelRequest, WireFormat
from proxy.http.wire import Headers, is_of_any_tenant
from proxy.identity.call_memory import CallMemory, response_fingerprint
from proxy.lookup import Lookup
from proxy.policies.owners import Owners
from proxy.strict_bodies import FORM, is_plain, read_form, repeated_name
from proxy.upstreams.upstreams import shown
from store.questions import known_responses
from store.tenants import DEFAULT, own_digests, scoped


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODEL: Final = "model"
# What any request that samples may say: OpenAI's fields, and those of vLLM and SGLang.
_SAMPLING: Final = _words("""
    model stream stream_options n best_of seed temperature top_p top_k min_p stop stop_token_ids
    max_tokens max_completion_tokens max_output_tokens min_tokens logprobs top_logprobs logit_bias
    prompt_logprobs logprob_token_ids presence_penalty frequency_penalty repetition_penalty
    length_penalty repetition_detection bad_words allowed_token_ids ignore_eos use_beam_search
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens echo
    add_special_tokens truncate_prompt_tokens truncation_side return_token_ids return_prompt_text
    return_tokens_as_token_ids return_token_offsets stream_interval thinking_token_budget
    response_format structured_outputs guided_json guided_regex guided_choice guided_grammar regex
    ebnf json_schema user metadata store safety_identifier prompt_cache_key prompt_cache_retention
    prompt_cache_options
""")
_PROMPTING: Final = _words("""
    messages tools chat_template chat_template_kwargs add_generation_prompt continue_final_message
    mm_processor_kwargs media_io_kwargs documents
""")
_MESSAGES: Final = _words("""
    model messages system max_tokens stream stop_sequences temperature top_p top_k tools tool_choice
    metadata thinking output_config output_format context_management mcp_servers cache_control
    chat_template_kwargs
""")
# The fields of a tenant's request, by path; a field whose value is null says nothing.
FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "/v1/chat/completions": _SAMPLING
    | _PROMPTING
    | _words("""
        functions function_call tool_choice parallel_tool_calls modalities audio prediction
        verbosity reasoning reasoning_effort include_reasoning separate_reasoning stream_reasoning
        thinking enable_thinking web_search_options
    """),
    "/v1/completions": _SAMPLING | {"prompt", "suffix"},
    "/v1/responses": _SAMPLING
    | _words("""
        input instructions previous_response_id tools tool_choice parallel_tool_calls max_tool_calls
        reasoning include_reasoning text include truncation background context_management
        chat_template_kwargs mm_processor_kwargs media_io_kwargs enable_response_messages
    """),
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/v1/embeddings": _PROMPTING
    | _words("model input user dimensions encoding_format normalize truncate_prompt_tokens")
    | {"add_special_tokens"},
    "/tokenize": _PROMPTING | _words("model prompt add_special_tokens return_token_strs"),
    "/detokenize": _words("model tokens"),
    "/v1/moderations": _words("model input"),
    "/v1/audio/speech": _words(
        "model input voice instructions speed response_format stream_format"
    ),
    "/v1/audio/transcriptions": _words("""
        model prompt language languages keywords temperature response_format stream include
        timestamp_granularities chunking_strategy known_speaker_names known_speaker_references
    """),
    "/v1/audio/translations": _words("model prompt temperature response_format"),
    "/v1/images/generations": _words("""
        model prompt n size quality style background moderation output_format output_compression
        partial_images response_format stream user safety_identifier
    """),
    "/v1/images/edits": _words("""
        model prompt image images mask n size quality background moderation input_fidelity
        output_format output_compression partial_images response_format stream user
        safety_identifier
    """),
    "/v1/images/variations": _words("model image n size response_format user"),
}
# Members of objects within these fields, at any depth.
MEMBERS: Final = _words("""
    acknowledged_safety_checks allowed_callers allowed_domains allowed_tools always
    approval_request_id approve approximate async audio audio_url authorization authorization_token
    background blocked_domains budget_tokens button cache_control call_id caller caller_id
    categories cited_text city clear_at clear_at_least clear_tool_inputs client_tool_results code
    command commands compact_threshold complexity connector_id container content context
    continuous_usage_stats country custom data defer_loading definition description detail diff
    disable_parallel_tool_use display display_height display_height_px display_number display_width
    display_width_px domain eager_input_streaming edits effort enable_zoom enabled encrypted_content
    encrypted_index encrypted_stdout end_index environment error error_code error_message
    exclude_tools execution exit_code external_web_access file file_data file_type file_url filename
    filters format frame_count frame_duration_ms from function function_call generate_summary
    grammar id image image_url include_obfuscation include_usage index input input_audio
    input_fidelity input_image_mask input_tokens instructions is_error is_file_update keep key keys
    lines logs max_characters max_content_tokens max_num_results max_output_length max_tokens
    max_uses mcp_server_name media_type memory_limit message mode model moderation
    moderation_details moderation_stage name namespace never new_lines new_start num_lines old_lines
    old_start operation outcome output output_compression output_config output_format output_tokens
    outputs oversized_image page_age param partial_images path pattern pause_after_compaction
    pending_safety_checks phase policy prefix_padding_ms prompt_cache_breakpoint quality queries
    query read_only reason reasoning reasoning_content reasoning_tokens recipient refusal region
    remaining require_approval response_inclusion result results retrieved_at return_code
    revised_prompt role scope score search_content_types search_context_size server_description
    server_label server_name server_tool_results server_url signature silence_duration_ms size
    source sources speed start_index start_line status stderr stdout stop_reason strict summary svg
    svg_usage syntax task_budget text thinking threshold timeout_ms timezone title to token_budget
    tool tool_call_id tool_calls tool_changes tool_configuration tool_id tool_name tool_names
    tool_references tool_use_id tools toolset_name total total_lines total_tokens transcript
    transformations trigger ttl type url url_sources user_id user_input user_location value
    verbosity version video video_url voice wait working_directory x y
""")
# The client's own content, in which any name may stand.
FREE: Final = _words("""
    action actions annotations arguments attributes chat_template_kwargs citations configs
    default_config documents env headers input_examples input_schema json_schema logit_bias logprobs
    media_io_kwargs metadata mm_processor_kwargs output_schema parameters properties schema
    structured_outputs top_logprobs
""")
# Items of a response's input that say all themselves, or under one of these members.
ITEMS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        _words("""
            apply_patch_call apply_patch_call_output compaction computer_call computer_call_output
            custom_tool_call custom_tool_call_output function_call function_call_output
            local_shell_call local_shell_call_output mcp_approval_request mcp_approval_response
            mcp_call mcp_list_tools message shell_call shell_call_output tool_search_call
            tool_search_output web_search_call
        """),
        (),
    ),
    "reasoning": ("encrypted_content", "content"),
    "image_generation_call": ("result",),
}
# Words and ids that tenants may not send, and that name no model.
_NO_MODELS: Final = _words("""
    query text texts conversation session_id request_id cache_salt litellm_session_id
    litellm_trace_id text_format
""")
QUERY: Final = _words("model beta api-version after after_id before_id limit order")
# Keys of `metadata` by which LiteLLM's logging takes an address or a credential, without their
# dashes and underscores and in small letters (`litellm/proxy/auth/auth_utils.py`).
_PLACE: Final = re.compile(
    r".*(?:api(?:base|url|key|token)|baseurl|(?:target|server|deployment|webhook|callback)url"
    r"|endpoint(?:url)?|secret(?:key)?|accesskey(?:id)?|sessiontoken|adtoken|identitytoken"
    r"|credentials?|credentialname|rolename|profilename|langfuse\w*host)"
)
_REMEDIES: Final[Mapping[str, str]] = {
    "extra_body": "write its fields beside the others",
    "conversation": "send the conversation itself",
    **dict.fromkeys(("file_id", "file_ids", "container", "uuid"), "send the content itself"),
    **dict.fromkeys(
        _words("url audio_url file_url image_url server_url video_url"),
        "name a public address by http:// or https://, or send the content itself",
    ),
}
# An address that all readers take alike: some would leave out a space or turn a backslash.
_URL: Final = re.compile(
    r"https?://(?:[^\s/?#@\\]*@)?(\[[0-9a-f:.]+\]|[\w.-]+)(?::\d*)?(?:[/?#][^\s\\]*)?",
    re.ASCII | re.IGNORECASE,
)
_CONTENT_TYPE: Final = b"content-type"
_CONTENT_ENCODING: Final = b"content-encoding"
# A response of another worker is known once the ingester has stored it, which takes a moment.
WAIT_S: Final = 2.0
LOOK_S: Final = 0.25
PAUSE_S: Final = 0.1


def check_call(
    owners: Owners, tenant: str, path: str, headers: Headers, request: ModelRequest
) -> None:
    """Check the body of a recorded call to `path`, which must be a JSON object.

    Raises:
        NotServed: it names a version that is hidden from its sender.
        BadRequest: it has a field that is not its tenant's to send, or more than one meaning.
    """
    if tenant == owners.sole:
        return
    if request.parsed is None:
        # A server may read what the proxy cannot: another encoding, or an object of any depth.
        raise BadRequest(
            "The body is not a JSON object in UTF-8, or it is nested too deep, so it is not "
            "known which model it names: send a JSON object",
            code="invalid_json",
        )
    _type_of(headers, request.body)
    try:
        repeated = repeated_name(request)
        fields = _all_fields(request)
    except ValueError as error:
        raise BadRequest(
            f"The body cannot be read ({error}), so it is not known what it names: send numbers "
            "of fewer digits, or texts in their place",
            code="invalid_json",
        ) from error
    if repeated is not None:
        raise BadRequest(
            f"An object of the body has {shown(repeated)!r} twice, and which of the two counts is "
            "not the same for all servers: send it once",
            param=shown(repeated),
            code="unclear_body",
        )
    _check_fields(owners, tenant, path, fields)


def check_forwarded(
    owners: Owners, tenant: str, path: str, headers: Headers, request: ModelRequest
) -> None:
    """Check a body that is passed on unrecorded, as `check_call` does; it may be a form."""
    if not request.body:
        return
    content_type = _type_of(headers, request.body)
    if not content_type.lower().startswith(FORM):
        check_call(owners, tenant, path, headers, request)
        return
    try:
        form = read_form(content_type, request.body)
    except ValueError as error:
        raise BadRequest(
            f"The form in the body cannot be read ({error}), so it is not known what it names: "
            "send it as HTTP libraries write forms",
            code="invalid_form",
        ) from error
    for text in form.texts:
        owners.check(tenant, text)
    if tenant != DEFAULT:
        _check_fields(owners, tenant, path, form.fields)


def check_query(owners: Owners, tenant: str, target: str) -> None:
    """Check the query in a request's target, as `check_call` checks a body."""
    for name, value in parse_qsl(target.partition("?")[2], keep_blank_values=True):
        owners.check(tenant, value, name)
        if tenant != DEFAULT and name not in QUERY:
            raise _not_allowed(name)


def check_headers(owners: Owners, tenant: str, headers: Headers) -> None:
    """Check that no header that is passed on names a version that is hidden from the tenant.

    Raises:
        NotServed: a header does.
    """
    # Of other tenants only headers of a list are passed on.
    if tenant != DEFAULT:
        return
    for name, value in headers:
        # Nearly no value has an @; a product's name and version may.
        if b"@" in value and not is_of_any_tenant(name):
            owners.check(tenant, value.decode("latin-1"), name.decode("latin-1"))


def _all_fields(request: ModelRequest) -> Mapping[str, Any]:
    """Return a request's fields, also those that hold a number like 1e400.

    Raises:
        ValueError: a field cannot be read even so.
    """
    parsed = request.parsed or {}
    unread = {
        name: json.loads(bytes(parsed[name]))
        for name, value in request.fields.items()
        if isinstance(value, str) and bytes(parsed[name]).lstrip().startswith((b"[", b"{"))
    }
    return {**request.fields, **unread} if unread else request.fields


def _type_of(headers: Headers, body: bytes) -> str:
    """Return the content type of a body that means the same to whoever reads it.

    Raises:
        BadRequest: its headers, or a type that does not fit it, let it mean something else.
    """
    types = [value for name, value in headers if name.lower() == _CONTENT_TYPE]
    codings = [value for name, value in headers if name.lower() == _CONTENT_ENCODING]
    content_type = (types or [b""])[0].decode(errors="surrogateescape").strip()
    if len(types) > 1:
        raise _unclear("has several Content-Type headers", "send one")
    if any(coding.strip().lower() not in (b"", b"identity") for coding in codings):
        raise _unclear("has a Content-Encoding", "send it without")
    if not is_plain(content_type):
        raise _unclear("is in another character set than UTF-8", "encode it as UTF-8")
    # What divides the fields of a form in a URL's encoding.
    if "urlencoded" in content_type.lower() and (b"&" in body or b";" in body):
        raise _unclear(
            "is sent as a form in a URL's encoding",
            "say what it is, as with Content-Type: application/json",
        )
    return content_type


def _unclear(reason: str, remedy: str) -> BadRequest:
    return BadRequest(
        f"The body {reason}, so it is not known which model it names: {remedy}", code="unclear_body"
    )


def _check_fields(owners: Owners, tenant: str, path: str, fields: Mapping[str, Any]) -> None:
    allowed = FIELDS.get(path, frozenset())
    if tenant == DEFAULT:
        allowed |= _NO_MODELS
    for name, value in fields.items():
        if name == MODEL or (tenant == DEFAULT and name not in allowed):
            # Gateways take models by fields that nobody can list, such as `fallbacks`.
            for text in _texts(value):
                owners.check(tenant, text, name)
        elif name not in allowed and value is not None:
            raise _not_allowed(name)
        elif tenant == DEFAULT:
            for tool in value if name == "tools" and isinstance(value, list) else ():
                owners.check(tenant, _model_of(tool), name)
        elif name not in FREE:
            refused = _refused_in(owners, tenant, value, is_item=False)
            if refused is not None:
                raise _not_allowed(name + refused)
    if tenant != DEFAULT:
        _check_metadata(fields.get("metadata"))
        if path == "/v1/responses":
            _check_items(fields.get("input"))


def _refused_in(owners: Owners, tenant: str, value: object, *, is_item: bool) -> str | None:
    """Return the path of the first member within a value that a tenant may not send, or None.

    An `id` is that of an item, as of a message or a tool call: elsewhere it names what a provider
    keeps, such as a stored prompt or a voice.
    """
    if isinstance(value, dict):
        for name, member in value.items():
            if member is None or name in FREE or (name == "input" and isinstance(member, dict)):
                continue
            is_named = name == "container" and not isinstance(member, dict)
            if name not in MEMBERS or is_named or (name == "id" and not is_item):
                return f".{name}"
            if name == MODEL:
                owners.check(tenant, member if isinstance(member, str) else None)
            if name.endswith("url") and isinstance(member, str) and not _is_public(member):
                return f".{name}"
            refused = _refused_in(owners, tenant, member, is_item=False)
            if refused is not None:
                return f".{name}{refused}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refused = _refused_in(owners, tenant, item, is_item=True)
            if refused is not None:
                return f"[{index}]{refused}"
    return None


def _is_public(url: str) -> bool:
    """Return whether a text names no place, or one that all readers look for in the internet."""
    if ":" not in url or url[:5].lower() == "data:":
        return True
    named = _URL.fullmatch(url)
    host = "" if named is None else named[1].lower().strip("[].")
    with suppress(OSError):
        # An IPv4 address has many forms, such as 0x7f.1.
        host = inet_ntoa(inet_aton(host))
    try:
        return ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".localhost", ".local", ".internal"))


def _check_items(items: object) -> None:
    """Check that the items of a response's input are no references to items that are kept."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, list):
            raise _not_allowed(f"input[{index}]", "send its items beside the others")
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if kind is None and item.get("role"):
            # The type of a message may be left out, as may that of a reference.
            continue
        said_in = ITEMS.get(kind) if isinstance(kind, str) else None
        if said_in is None or (said_in and item.get("id") and not any(map(item.get, said_in))):
            thoughts = ", thoughts as the `encrypted_content` that `include` asks for"
            raise _not_allowed(
                f"input[{index}]",
                f"send the item itself{thoughts if kind == 'reasoning' else ''}",
            )


def _check_metadata(metadata: object) -> None:
    for name in metadata if isinstance(metadata, dict) else ():
        if _PLACE.fullmatch(name.casefold().replace("_", "").replace("-", "")):
            raise _not_allowed(f"metadata.{name}")


def _not_allowed(path: str, remedy: str = "") -> BadRequest:
    name = re.split(r"[.\[]", path)[-1]
    remedy = remedy or _REMEDIES.get(name, "leave it out")
    return BadRequest(
        f"{shown(path)} is not among what tenants may send through this proxy: {remedy}",
        param=shown(path),
        code="field_not_allowed",
    )


def _model_of(tool: object) -> str | None:
    model = tool.get(MODEL) if isinstance(tool, dict) else None
    return model if isinstance(model, str) else None


def _texts(value: object) -> Iterator[str]:
    waiting: list[Any] = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            waiting.extend(part)
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def responses_named(wire_format: WireFormat, request: ModelRequest) -> list[str]:
    """Return the ids of the responses that a call goes on from."""
    fields = request.fields
    # Gateways take what is in `extra_body` as if it stood beside it.
    extra = fields.get("extra_body")
    holders = [fields, extra] if isinstance(extra, dict) else [fields]
    return [name for name in map(wire_format.turns.continues, holders) if name is not None]


async def check_continued(
    tenant: str, dialect: str, named: str, owners: Owners, memory: CallMemory, lookup: Lookup
) -> None:
    """Check that the response that a call goes on from is not another tenant's.

    A provider keeps all tenants' responses under one account, and goes on from any. A tenant's must
    be known as its own. The default tenant's must not be known as another tenant's: the provider
    may keep responses of its own that no proxy has seen.

    Raises:
        NotContinued: the response is another tenant's, or a tenant's that nobody knows.
        NotKnownNow: the database does not answer, and this worker does not know the response.
    """
    others = owners.other_tenants if tenant == DEFAULT else frozenset()
    fingerprint = response_fingerprint(named)
    digests = {name: own_digests(name, [fingerprint])[0] for name in (tenant, *others)}
    names = {scoped(name, named): name for name in (tenant, *others)}

    async def ask(driver: Any) -> set[str]:
        return await known_responses(driver, list(names), dialect)

    clock = asyncio.get_running_loop().time
    deadline = clock() + WAIT_S
    # No text that PostgreSQL keeps has U+0000, and it takes none in a query.
    is_possible = "\x00" not in named
    while True:
        known = {name for name, digest in digests.items() if memory.knows(digest)}
        is_answered = True
        if not known and is_possible:
            found = await lookup.ask(ask, within_s=LOOK_S)
            is_answered = found is not None
            known = {names[name] for name in found or ()}
        if tenant in known:
            return
        if known or not is_possible or clock() >= deadline:
            break
        await asyncio.sleep(PAUSE_S)
    if not is_answered:
        raise NotKnownNow(
            f"It is not known now whether response {shown(named)!r} is yours, as the database does "
            "not answer: send the request again, or the conversation itself",
            param="previous_response_id",
        )
    if known or tenant != DEFAULT:
        raise NotContinued(
            f"There is no response {shown(named)!r} to go on from: send the conversation itself, "
            "or the id of a response that you got",
            param="previous_response_id",
            code="previous_response_not_found",
        )
