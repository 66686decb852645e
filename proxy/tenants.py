"""Keep tenants from reaching each other's objects by naming them in requests.

One model server, and one account at a provider, serve all tenants. A request could name another
tenant's version, file, response or cache, or send itself to another address. So in a tenant's body

- references to such objects are refused, with their place in the body;
- tools and options are passed on if they are listed here, and others are left out with a warning:
  a gateway may take them for an address, a key or a store;
- conversations are passed on without members that may be references or addresses that are not
  public.

So a call with a new field does not fail; the field is left out until it is listed here. The default
tenant owns the account and may send any field, but must not name another tenant's version, nor
continue another tenant's response.

All parsers must read a body alike: if any version is hidden from the sender, a body that servers
may read in different ways is refused (docs/decisions/068-tenants.md).
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from socket import inet_aton, inet_ntoa
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from proxy.errors import BadRequest, NotContinued, NotKnownNow
from proxy.formats.base import ModelRequest, WireFormat
from proxy.http.wire import Headers, is_allowed_for_all_tenants
from proxy.identity.call_memory import CallMemory, response_fingerprint
from proxy.lookup import Lookup
from proxy.policies.owners import Owners
from proxy.strict_bodies import FORM, extends_ascii, read_form, repeated_name
from proxy.upstreams.upstreams import shortened
from store.driver import Driver
from store.questions import known_responses
from store.tenants import DEFAULT, keyed_digests, scoped


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The place of a member: the place of its container (None: the body), and its name or index.
Place = tuple["Place | None", str | int]

MODEL: Final = "model"
# Fields of calls: the APIs' fields, and sampling settings of vLLM and SGLang.
_OF_CALLS: Final = _words("""
    model messages input prompt system instructions suffix prediction documents chat_template
    chat_template_kwargs add_generation_prompt continue_final_message mm_processor_kwargs
    media_io_kwargs tools tool_choice parallel_tool_calls max_tool_calls functions function_call
    stream stream_options stream_interval background n best_of seed temperature top_p
    top_k min_p stop stop_sequences stop_token_ids max_tokens max_completion_tokens
    max_output_tokens min_tokens logprobs top_logprobs logit_bias prompt_logprobs logprob_token_ids
    presence_penalty frequency_penalty repetition_penalty length_penalty repetition_detection
    bad_words allowed_token_ids ignore_eos use_beam_search echo add_special_tokens
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation truncation_side return_token_ids return_prompt_text
    return_tokens_as_token_ids return_token_offsets return_token_strs tokens dimensions
    encoding_format normalize thinking enable_thinking thinking_token_budget reasoning
    reasoning_effort include_reasoning separate_reasoning stream_reasoning verbosity text include
    modalities audio web_search_options response_format output_config output_format
    structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf json_schema
    enable_response_messages context_management cache_control user metadata store safety_identifier
    prompt_cache_key prompt_cache_retention prompt_cache_options
""")
_OF_MESSAGES: Final = _OF_CALLS | {"mcp_servers"}
# `check_continued` checks whether the tenant may continue the response.
_OF_RESPONSES: Final = _OF_CALLS | {"previous_response_id"}
_OF_MEDIA: Final = _words("""
    model input prompt voice instructions speed stream stream_format response_format temperature
    language languages keywords include timestamp_granularities chunking_strategy
    known_speaker_names known_speaker_references image images mask n size quality style background
    moderation input_fidelity output_format output_compression partial_images user
    safety_identifier
""")
# Members of tools and options at any depth, and ids of a conversation's own parts.
ALLOWED_MEMBERS: Final = _words("""
    allowed_callers allowed_domains allowed_tools always approval_request_id approximate async audio
    authorization authorization_token background blocked_domains budget_tokens cache_control call_id
    caller_id city clear_at clear_at_least clear_tool_inputs client_tool_results compact_threshold
    complexity connector_id container content context continuous_usage_stats country custom data
    defer_loading definition description detail disable_parallel_tool_use display display_height
    display_height_px display_number display_width display_width_px domain eager_input_streaming
    edits effort enable_zoom enabled environment exclude_tools execution external_web_access file
    file_data file_url filename filters format frame_count frame_duration_ms function
    generate_summary grammar id image image_url include_obfuscation include_usage input_fidelity
    input_image_mask input_tokens instructions keep key keys max_characters max_content_tokens
    max_num_results max_output_length max_tokens max_uses mcp_server_name media_type memory_limit
    mode model moderation moderation_stage name namespace never output output_compression
    output_config output_format partial_images path pause_after_compaction policy prefix_padding_ms
    prompt_cache_breakpoint quality query read_only reasoning region remaining require_approval
    response_inclusion role scope search_content_types search_context_size server_description
    server_label server_name server_tool_results server_url silence_duration_ms size source speed
    strict summary svg svg_usage syntax task_budget text thinking threshold timezone tool
    tool_call_id tool_configuration tool_id tool_names tool_use_id tools toolset_name total trigger
    ttl type url url_sources user_id user_input user_location value verbosity version voice
""")
# Fields of a conversation, whose members are passed on unless they may be references.
CONVERSATION_FIELDS: Final = _words("messages input prompt system instructions prediction")
# Members with tools and options, also within a conversation.
OPTION_FIELDS: Final = _words("tool tools toolset container environment")
# Names of members that may refer to stored objects, cached pictures, or tensors to load.
REFERENCE_NAMES: Final = re.compile(r".*(?:id|handle|embed)s?[^a-z0-9]*", re.DOTALL)
# Names of members whose values servers may fetch.
_FETCHED: Final = re.compile(
    r".*(?:(ur[il]|href|src)|image|video|audio|file|media|data)s?[^a-z0-9]*", re.DOTALL
)
# Members with the client's own content, in which any name is allowed.
FREE_FORM_FIELDS: Final = _words("""
    action actions annotations arguments attributes chat_template_kwargs citations configs
    default_config documents env headers input_examples input_schema json_schema logit_bias logprobs
    media_io_kwargs metadata mm_processor_kwargs output_schema parameters properties schema
    structured_outputs top_logprobs
""")
# Types of a response's input items that carry their content; one of the members, if any, must
# be present.
INLINE_ITEMS: Final[Mapping[str, tuple[str, ...]]] = {
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
# Fields besides the allowed ones whose words and ids name no model.
_NO_MODELS: Final = _words("""
    query text texts conversation session_id request_id cache_salt litellm_session_id
    litellm_trace_id text_format
""")
ALLOWED_QUERY: Final = _words("model beta api-version after after_id before_id limit order")
# Names of fields, also in `metadata`, from which LiteLLM takes an address or a credential; in lower
# case without dashes and underscores (`litellm/proxy/auth/auth_utils.py`).
_STEERING: Final = re.compile(
    r".*(?:api(?:base|url|key|token)|baseurl|(?:target|server|deployment|webhook|callback)url"
    r"|endpoint(?:url)?|secret(?:key)?|accesskey(?:id)?|sessiontoken|adtoken|identitytoken"
    r"|credentials?|credentialname|rolename|profilename|langfuse\w*host)"
)
# Fields and members that refer to an object or an address, with the remedy in the error.
REFERENCES: Final[Mapping[str, str]] = {
    "extra_body": "write its fields beside the others",
    "conversation": "send the conversation itself",
    **dict.fromkeys(
        _words("""
            audio_embeds container container_id file_id file_ids id image_embeds prompt
            prompt_embeds skill_id skills uuid vector_store_ids video_embeds
        """),
        "send the content itself",
    ),
    **dict.fromkeys(
        _words("""
            bootstrap_host cache_salt ec_transfer_params extra_headers fallbacks kv_transfer_params
            litellm_metadata litellm_params lora_path models plugins previous_response_id priority
            request_id rid session_id tunnel_id user_config vllm_xargs
        """),
        "leave it out",
    ),
}
_ADDRESS_REMEDY: Final = "name a public address by http:// or https://, or send the content itself"
# An address that all parsers read alike: some drop spaces, or read a backslash as a slash.
_URL: Final = re.compile(
    r"https?://(?:[^\s/?#@\\]*@)?(\[[0-9a-f:.]+\]|[\w.-]+)(?::\d*)?(?:[/?#][^\s\\]*)?",
    re.ASCII | re.IGNORECASE,
)
_CONTENT_TYPE: Final = b"content-type"
_CONTENT_ENCODING: Final = b"content-encoding"
_MOST_WARNED: Final = 300
_MOST_READ: Final = 100
# Wait so long for the ingester to store a response that another worker has just passed on.
STORED_RESPONSE_WAIT_S: Final = 2.0
STORED_RESPONSE_LOOKUP_S: Final = 0.25
STORED_RESPONSE_RETRY_S: Final = 0.1


def check_call(
    owners: Owners, tenant: str, path: str, headers: Headers, request: ModelRequest
) -> tuple[ModelRequest, str | None]:
    """Return a recorded call's request as it is to be sent, and a warning of omitted fields.

    The warning is None if nothing is left out.

    Raises:
        NotServed: it names a version that is hidden from its sender.
        BadRequest: it is not an unambiguous JSON object, or names an object that is not its
            tenant's.
    """
    if tenant == owners.sole:
        return request, None
    if request.parsed is None:
        # A server may read what the proxy cannot: another encoding, or an object of any depth.
        raise BadRequest(
            "The body is not a JSON object in UTF-8, or it is nested too deep, so it is not "
            "known which model it names: send a JSON object",
            code="invalid_json",
        )
    _checked_content_type(headers, request.body)
    try:
        repeated = repeated_name(request)
        fields = _all_fields(request)
    except ValueError as error:
        raise _unreadable(error) from error
    if repeated is not None:
        raise BadRequest(
            f"An object in the body has {shortened(repeated)!r} twice, and servers differ in which "
            "value they use: send it once",
            param=shortened(repeated),
            code="unclear_body",
        )
    if tenant == DEFAULT:
        _check_models(owners, path, fields)
        return request, None
    left_out = _check_fields(owners, tenant, path, fields)
    if not left_out:
        return request, None
    try:
        return _without_places(request, left_out), _warning(left_out)
    except ValueError as error:
        raise _unreadable(error) from error


def check_forwarded(
    owners: Owners, tenant: str, path: str, headers: Headers, request: ModelRequest
) -> tuple[ModelRequest, str | None]:
    """Check a body that is passed on unrecorded, as `check_call` does; it may be a form.

    Nothing is left out of a form: it is refused if it has a field that `check_call` would leave
    out.
    """
    if not request.body:
        return request, None
    content_type = _checked_content_type(headers, request.body)
    if not content_type.lower().startswith(FORM):
        return check_call(owners, tenant, path, headers, request)
    try:
        form = read_form(content_type, request.body)
    except ValueError as error:
        raise BadRequest(
            f"The form in the body cannot be read ({error}), so it is not known which objects it "
            "names: send it as HTTP libraries write forms",
            code="invalid_form",
        ) from error
    for text in form.texts:
        owners.check(tenant, text)
    if tenant != DEFAULT:
        for place in _check_fields(owners, tenant, path, form.fields):
            raise _not_allowed(place)
    return request, None


def check_query(owners: Owners, tenant: str, target: str) -> None:
    """Check the query of a request's target.

    Raises:
        NotServed: it names a version that is hidden from the tenant.
        BadRequest: it has a parameter that only the default tenant may send.
    """
    for name, value in parse_qsl(target.partition("?")[2], keep_blank_values=True):
        owners.check(tenant, value, name)
        if tenant != DEFAULT and name not in ALLOWED_QUERY:
            raise _not_allowed((None, name))


def check_headers(owners: Owners, tenant: str, headers: Headers) -> None:
    """Check that no header of the default tenant names a version that is hidden from it.

    Raises:
        NotServed: a header names one.
    """
    # Headers of other tenants are passed on only if they are listed.
    if tenant != DEFAULT:
        return
    for name, value in headers:
        # Nearly no value has an @. Headers of any tenant may have one, as in `product@version`.
        if b"@" in value and not is_allowed_for_all_tenants(name):
            owners.check(tenant, value.decode("latin-1"), name.decode("latin-1"))


def _all_fields(request: ModelRequest) -> Mapping[str, Any]:
    """Return a request's parsed fields, also those left unparsed for a number such as 1e400.

    Raises:
        ValueError: a field still cannot be read.
    """
    parsed = request.parsed or {}
    unread = {
        name: json.loads(bytes(parsed[name]))
        for name, value in request.fields.items()
        if isinstance(value, str) and bytes(parsed[name]).lstrip().startswith((b"[", b"{"))
    }
    return {**request.fields, **unread} if unread else request.fields


def _checked_content_type(headers: Headers, body: bytes) -> str:
    """Return a body's content type, after checking that all parsers read the body alike.

    Raises:
        BadRequest: parsers may read the body differently, by its headers or its content type.
    """
    types = [value for name, value in headers if name.lower() == _CONTENT_TYPE]
    codings = [value for name, value in headers if name.lower() == _CONTENT_ENCODING]
    content_type = (types or [b""])[0].decode(errors="surrogateescape").strip()
    if len(types) > 1:
        raise _unclear_body("has several Content-Type headers", "send one")
    if any(coding.strip().lower() not in (b"", b"identity") for coding in codings):
        raise _unclear_body("has a Content-Encoding", "send it without")
    if not extends_ascii(content_type):
        raise _unclear_body("is in another character set than UTF-8", "encode it as UTF-8")
    # These separate the fields of a URL-encoded form.
    if "urlencoded" in content_type.lower() and (b"&" in body or b";" in body):
        raise _unclear_body(
            "is sent as a form in a URL's encoding",
            "say what it is, as with Content-Type: application/json",
        )
    return content_type


def _unclear_body(reason: str, remedy: str) -> BadRequest:
    return BadRequest(
        f"The body {reason}, so it is not known which model it names: {remedy}", code="unclear_body"
    )


def allowed_fields(path: str) -> frozenset[str]:
    """Return the names of fields that any tenant may send to a path."""
    if path.startswith(("/v1/audio/", "/v1/images/")):
        return _OF_MEDIA
    if path.startswith("/v1/messages"):
        return _OF_MESSAGES
    return _OF_RESPONSES if path == "/v1/responses" else _OF_CALLS


def _check_models(owners: Owners, path: str, fields: Mapping[str, Any]) -> None:
    """Check that a body of the default tenant names no other tenant's version.

    Gateways take models from fields that cannot all be listed, such as `fallbacks`.
    """
    without_models = (allowed_fields(path) | _NO_MODELS) - {MODEL}
    for name, value in fields.items():
        if name not in without_models:
            for text in _texts(value):
                owners.check(DEFAULT, text, name)
        elif name == "tools":
            for tool in value if isinstance(value, list) else ():
                model = tool.get(MODEL) if isinstance(tool, dict) else None
                owners.check(DEFAULT, model if isinstance(model, str) else None, name)


def _check_fields(owners: Owners, tenant: str, path: str, fields: Mapping[str, Any]) -> list[Place]:
    """Check the fields of a body, and return the places of those to leave out.

    Raises:
        NotServed, BadRequest: it names an object that is not its tenant's.
    """
    allowed, left_out = allowed_fields(path), list[Place]()
    for name, value in fields.items():
        if name == MODEL:
            for text in _texts(value):
                owners.check(tenant, text, name)
        elif name not in allowed and value is not None:
            folded = name.casefold()
            if folded in REFERENCES or folded in allowed or _steers_gateways(folded):
                raise _not_allowed((None, name))
            left_out.append((None, name))
        elif name == "prompt" and isinstance(value, dict):
            raise _not_allowed((None, name))
        elif name not in FREE_FORM_FIELDS:
            in_conversation = name in CONVERSATION_FIELDS
            _check_within(
                owners, tenant, value, name, (None, name), left_out, in_conversation=in_conversation
            )
    metadata = fields.get("metadata")
    for name in metadata if isinstance(metadata, dict) else ():
        if _steers_gateways(name.casefold()):
            raise _not_allowed(((None, "metadata"), name))
    if path == "/v1/responses":
        _check_items(fields.get("input"))
    return left_out


def _check_within(
    owners: Owners,
    tenant: str,
    value: object,
    folded: str,
    place: Place,
    left_out: list[Place],
    *,
    in_conversation: bool,
) -> None:
    """Check a member's value and all values within it; add the places to leave out.

    Args:
        owners: the tenants of the policies.
        tenant: the sender.
        value: the member's value.
        folded: the member's name in lower case.
        place: the value's place in the body.
        left_out: the list to which the places to leave out are added.
        in_conversation: whether the value is part of a conversation.

    Raises:
        NotServed, BadRequest: a member names an object that is not its tenant's.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            at = (place, index)
            _check_within(
                owners, tenant, item, folded, at, left_out, in_conversation=in_conversation
            )
    elif isinstance(value, dict):
        for name, member in value.items():
            if (
                member is None
                or name in FREE_FORM_FIELDS
                or (name == "input" and isinstance(member, dict))
            ):
                continue
            lower, inner = name.casefold(), (place, name)
            # Some parsers ignore the case of a name.
            is_odd = lower != name and lower in ALLOWED_MEMBERS
            if is_odd or _is_reference(lower, member, is_item=isinstance(place[1], int)):
                raise _not_allowed(inner)
            if name not in ALLOWED_MEMBERS and (
                not in_conversation or REFERENCE_NAMES.fullmatch(lower)
            ):
                left_out.append(inner)
                continue
            if lower == MODEL and isinstance(member, str):
                owners.check(tenant, member)
            stays_in = in_conversation and name not in OPTION_FIELDS
            _check_within(owners, tenant, member, lower, inner, left_out, in_conversation=stays_in)
    elif isinstance(value, str) and not _is_harmless(folded, value):
        if isinstance(place[1], int) or folded in ALLOWED_MEMBERS:
            raise _not_allowed(place, _ADDRESS_REMEDY)
        left_out.append(place)


def _is_reference(folded: str, member: object, *, is_item: bool) -> bool:
    """Return whether a member of an object refers to a stored object.

    The `id` of a list's item, such as a message or a tool call, is the item's own; elsewhere it
    names an object kept by the provider, such as a stored prompt or a voice.
    """
    if folded == "id":
        return not is_item
    if folded == "container":
        return not isinstance(member, dict)
    return isinstance(member, dict) if folded == "prompt" else folded in REFERENCES


def _steers_gateways(folded: str) -> bool:
    """Return whether gateways take an address or a credential from a field of this name."""
    # The pattern is slow on long names, which no gateway reads.
    return _STEERING.fullmatch(folded[-_MOST_READ:].replace("_", "").replace("-", "")) is not None


def _steps(place: Place) -> list[str | int]:
    """Return the names and indexes that lead from the body to a place."""
    steps, outer = [place[1]], place[0]
    while outer is not None:
        steps.append(outer[1])
        outer = outer[0]
    return steps[::-1]


def _without_places(request: ModelRequest, left_out: Sequence[Place]) -> ModelRequest:
    """Return a request without the places `left_out`; fields without any keep their bytes.

    Raises:
        ValueError: a field with a place to leave out has a number that cannot be encoded again.
    """
    parsed, changed = dict(request.parsed or {}), dict[str, Any]()
    known: dict[int, Any] = {}

    def value_at(place: Place) -> Any:
        # Places within one value share it, so each is looked up once.
        if id(place) not in known:
            outer, step = place
            if outer is None:
                field = str(step)
                known[id(place)] = changed[field] = json.loads(bytes(parsed[field]))
            else:
                known[id(place)] = value_at(outer)[step]
        return known[id(place)]

    for outer, name in left_out:
        holder: Any = parsed if outer is None else value_at(outer)
        del holder[name]
    for field, value in changed.items():
        parsed[field] = msgspec.Raw(json.dumps(value, allow_nan=False).encode())
    fields = {name: value for name, value in request.fields.items() if name in parsed} | changed
    body = msgspec.json.encode(parsed)
    return msgspec.structs.replace(request, body=body, parsed=parsed, fields=fields)


def _warning(left_out: Sequence[Place]) -> str:
    """Return a warning that lists the places, without list indexes."""
    # More places would not fit into the warning.
    shown_of = map(_steps, left_out[:_MOST_WARNED])
    names = dict.fromkeys(".".join(s for s in place if isinstance(s, str)) for place in shown_of)
    listed = ascii(", ".join(names))[:_MOST_WARNED]
    return f"left out, as it may refer to another tenant's object: {listed}"


def _is_harmless(folded: str, text: str) -> bool:
    """Return whether a member's text is not an address to fetch, or is a public address."""
    fetched = _FETCHED.fullmatch(folded)
    if fetched is None or not text or (":" not in text and not fetched[1]):
        return True
    return _is_public(text)


def _is_public(url: str) -> bool:
    """Return whether a URL is a `data:` URL, or names a public host by any parser's reading."""
    if url[:5].lower() == "data:":
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
    """Raise `BadRequest` if an item of a response's input refers to a stored item."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        place: Place = ((None, "input"), index)
        if isinstance(item, list):
            raise _not_allowed(place, "send its items beside the others")
        if not isinstance(item, dict) or not item.get("id"):
            continue
        kind = item.get("type")
        if kind is None and item.get("role"):
            # A message, which has a role, may lack a type; so may a reference.
            continue
        members = INLINE_ITEMS.get(kind) if isinstance(kind, str) else None
        if members is None or (members and not any(map(item.get, members))):
            thoughts = ", with the `encrypted_content` that `include` asks for"
            raise _not_allowed(
                place, f"send the item itself{thoughts if kind == 'reasoning' else ''}"
            )


def _not_allowed(place: Place, remedy: str = "") -> BadRequest:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in _steps(place))
    path = "".join(steps)[1:]
    remedy = remedy or REFERENCES.get(str(place[1]).casefold(), "leave it out")
    return BadRequest(
        f"{shortened(path)} is not among the fields that tenants may send through this proxy: "
        f"{remedy}",
        param=shortened(path),
        code="field_not_allowed",
    )


def _unreadable(error: ValueError) -> BadRequest:
    return BadRequest(
        f"The body cannot be read ({error}), so it is not known which objects it names: send "
        "numbers of fewer digits, or texts in their place",
        code="invalid_json",
    )


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
    """Return the ids of the earlier responses that a call asks to continue."""
    fields = request.fields
    # Gateways merge the fields of `extra_body` into the body.
    extra = fields.get("extra_body")
    holders = [fields, extra] if isinstance(extra, dict) else [fields]
    return [name for name in map(wire_format.turns.continued_reply_id, holders) if name is not None]


async def check_continued(
    tenant: str,
    dialect: str,
    response_id: str,
    owners: Owners,
    memory: CallMemory,
    lookup: Lookup,
) -> None:
    """Check that `tenant` may continue the response `response_id`.

    A provider keeps all tenants' responses under one account, and continues any of them. So the
    response must be known as the tenant's own. For the default tenant it may be unknown, as the
    provider may keep responses that no proxy has seen, but must not be known as another tenant's.

    Raises:
        NotContinued: the response is another tenant's or, except for the default tenant, unknown.
        NotKnownNow: the database does not answer, and this worker does not know the response.
    """
    others = owners.other_tenants if tenant == DEFAULT else frozenset()
    fingerprint = response_fingerprint(response_id)
    digests = {name: keyed_digests(name, [fingerprint])[0] for name in (tenant, *others)}
    names = {scoped(name, response_id): name for name in (tenant, *others)}

    async def ask(driver: Driver) -> set[str]:
        return await known_responses(driver, list(names), dialect)

    clock = asyncio.get_running_loop().time
    deadline = clock() + STORED_RESPONSE_WAIT_S
    # PostgreSQL neither stores U+0000 in a text nor accepts it in a query.
    is_possible = "\x00" not in response_id
    while True:
        owning_tenants = {
            name for name, digest in digests.items() if memory.remembers_fingerprint(digest)
        }
        is_answered = True
        if not owning_tenants and is_possible:
            stored = await lookup.ask(ask, within_s=STORED_RESPONSE_LOOKUP_S)
            is_answered = stored is not None
            owning_tenants = {names[name] for name in stored or ()}
        if tenant in owning_tenants:
            return
        if owning_tenants or not is_possible or clock() >= deadline:
            break
        await asyncio.sleep(STORED_RESPONSE_RETRY_S)
    if not is_answered:
        raise NotKnownNow(
            f"It is not known now whether response {shortened(response_id)!r} is yours, as the "
            "database does not answer: send the request again, or the conversation itself",
            param="previous_response_id",
        )
    if owning_tenants or tenant != DEFAULT:
        raise NotContinued(
            f"There is no response {shortened(response_id)!r} to continue: send the conversation "
            "itself, or the id of a response that you got",
            param="previous_response_id",
            code="previous_response_not_found",
        )
