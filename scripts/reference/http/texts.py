"""Explain what stands between the generated tables of the HTTP API's page."""

from typing import Final

from proxy.feedback.statements import MAX_ITEMS, MAX_TARGET_BYTES

INTRODUCTION: Final = """
The proxy listens on two ports: the data port (`PAWL_LISTEN`, 127.0.0.1:8100) for calls and
feedback, and the admin port (`PAWL_ADMIN_LISTEN`, 127.0.0.1:8101) for health and metrics. Both
speak HTTP/1.1. [openapi.json](openapi.json) describes both ports as OpenAPI 3.1.
"""
KEYS: Final = """
Until a key is made, only programs on the proxy's machine may call both ports, unless
`PAWL_ACCESS` says otherwise. From the first key on (`pawl keys create`) every route but
`/healthz` and `/readyz` asks for one, sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`:
`infer` for calls and what is forwarded, `feedback` for `/feedback`, `read` for `/metrics`, `admin`
for routes marked *account*. No route asks for `train` yet. Without a key, and with a wrong or
revoked one, the answer is 401; with one that is for something else, 403; beyond the key's limits,
429. Credentials never reach the upstream then. Each key belongs to a tenant, and all names in its
requests (of episodes, tasks, calls, responses, policies, idempotency keys) are that tenant's: what
another tenant has under a name is unknown.
"""
RECORDED: Final = """
Bodies are those of the upstream's API. They are passed through unchanged, streamed or not, except
that the requested model becomes the served version's name, and that vLLM is asked for token ids and
log-probabilities; both are undone in the reply. Where vLLM serves the model, a request to
`/v1/messages` is sent as a chat completion, because only that reports token ids, and the reply is
turned back into a message. A request that the upstream refuses as malformed (400 or 422) with these
additions is sent once more as the client wrote it. The end of a reply leaves after the call's
record is on disk.
"""
PREFIX: Final = """
A client that can set nothing but a base URL names a run in the path. Any of `/task/{task}`,
`/episode/{episode}`, `/agent/{agent}` and `/split/{split}`, in this order, may stand before a
route: `/episode/run-7/agent/writer/v1/chat/completions`. Values are percent-encoded. Request
headers win over the URL. Before routes that are not recorded the prefix has no effect.
"""
IDENTITY: Final = """
All request headers are optional. A malformed one never fails a call: it is ignored, the reply has
`x-pawl-warning`, and `pawl_warnings_total` counts it. All headers that begin with `x-pawl-` are
removed before the request goes to the upstream.
"""
EPISODE: Final = """
Without a name in our headers or in the URL, the first of the following names the episode, as
`NAMESPACE:VALUE`. Failing these, a call joins the episode whose reply it repeats (a tool call's id,
`previous_response_id` or the conversation so far), or the trace in `traceparent`; otherwise it is
an episode of its own. An SDK's repetition of a failed request (`x-stainless-retry-count`) joins the
episode of the first attempt.
"""
AGENT: Final = """
Agent, task and split are also read from `metadata` (`pawl_agent`, `pawl_task`, `pawl_split`) and
from W3C baggage (`pawl.agent`, `pawl.task`, `pawl.split`); the agent also from
`x-openai-subagent`, `x-litellm-agent-id`, `metadata.agent_name` and the baggage
`gen_ai.agent.name`. A request with `x-claude-code-agent-id`
or `x-parent-session-id` is of the agent `subagent`.
"""
FEEDBACK: Final = f"""
The body is one statement, or a list of 1 to {MAX_ITEMS:,} statements that are accepted or refused
together. Each names exactly one target: an `episode`, a `call` or a `response`, of at most
{MAX_TARGET_BYTES:,} bytes in UTF-8. A field that is null counts as left out; an unknown field is an
error. Statements are durable before the reply is sent. They may come before their target, and days
after it. The newest statement of a metric about a target counts. The reply has one result per
statement, in the same order.
"""
FEEDBACK_EXAMPLES: Final = """```json
{"metric": "reward", "value": 0.8, "episode": "run-7"}
```

```json
{"results": [{"id": "019a1b2c-3d4e-7f60-8a9b-0c1d2e3f4a5b", "status": "stored"}]}
```"""
FORWARDED: Final = """
These requests are passed on unchanged and unrecorded, in any size, streamed both ways. With several
upstreams (`PAWL_UPSTREAMS`), a body is read first, up to `PAWL_MAX_BODY_MB`, to find the upstream
by its `model`, and `GET /v1/models` joins the lists of all. `GET` routes
take `HEAD`, too. Any other method and path is refused with 404: the list is an allow-list, so that
the model server's own adapter and administration endpoints cannot be reached. Routes marked
*account* manage the account at the provider: they need a key for `admin`, and are refused if the
proxy sends requests with its own key. `DELETE` of a model also needs
`PAWL_ALLOW_MODEL_DELETE=true`. Routes marked *kept* reach what the provider keeps under one account
for all tenants: keys of other tenants than the default one are refused with 403. Where there are
several tenants, the bodies of all other routes are read, up to `PAWL_MAX_BODY_MB`, and a version of
another tenant's policy is refused as unknown; `GET /v1/models` leaves it out.
"""
ERROR_CLASSES: Final = """
Every reply of status 400 and above has `x-pawl-fault`. Errors that the upstream answers are passed
on as they are. Errors of the proxy have one of these classes, under which `pawl_refused_total`
counts them:
"""
ERROR_BODIES: Final = """
The body has the shape of the client's API: `{"error": {"message", "type", "param", "code"}}`, and
below `/v1/messages` `{"type": "error", "error": {"type", "message"}}`. A stream that breaks off
ends with an error event as the API has it, and the connection is closed without the stream's
regular end.
Anthropic's types follow the status; a status that is not listed is `invalid_request_error` below
500, and `api_error` from 500 on:
"""
ERROR_NOT_READ: Final = """
What cannot be read as a request is answered with one of these statuses, in the same shape, and the
connection is closed:
"""
ADMIN: Final = """
The admin port serves three routes:
"""
TRAINER: Final = """
The trainer serves `GET /metrics` on `PAWL_TRAINER_LISTEN` (127.0.0.1:8102), and the steward
`GET /healthz`, `GET /readyz` and `GET /metrics` on `PAWL_STEWARD_LISTEN` (127.0.0.1:8103). Its
`/readyz` is always 200, and says why versions are not loaded: their files were altered, or cannot
be read for now (`unread`), or a replica served them otherwise than they were trained (`misserved`).
"""
