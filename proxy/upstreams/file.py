"""Read the TOML file of upstreams: which servers there are, and which models each answers for.

Parsing is pure; `load_upstreams` reads the file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    model_validator,
)

from proxy.errors import BadUpstreams
from store.toml_file import TableFile
from store.values.sampling import parse_server_defaults

# How the key is sent: `authorization` as OpenAI wants it, `x-api-key` as many gateways want it, or
# as Anthropic wants it: `x-api-key` in its own API, and a bearer token in OpenAI's format
# (https://docs.anthropic.com/en/api/openai-sdk).
Style = Literal["authorization", "x-api-key", "anthropic"]

TABLE: Final = "upstream"
ANTHROPIC: Final = "api.anthropic.com"

REMEDIES: Final[Mapping[str, str]] = {
    "name": 'name = "local"',
    "kind": 'kind = "openai" or kind = "litellm"',
    "urls": 'urls = ["http://127.0.0.1:8000/v1"], a replica each',
    "models": 'models = ["calculator", "qwen*"], a name or the beginning of names and one *',
    "default": "default = true, in one table",
    "api_key_env": 'api_key_env = "OPENAI_API_KEY", the variable that holds the key',
    "api_key_header": 'api_key_header = "authorization" or "x-api-key"',
    "provider": 'provider = "gemini", as litellm writes it before a model\'s name',
    "default_sampling": "default_sampling = { temperature = 0.6, top_p = 0.95, top_k = 20 }",
    "tool_parser": 'tool_parser = "hermes", as vLLM\'s --tool-call-parser has it',
    "options": 'options = { api_version = "2024-10-21" }, as litellm.acompletion takes them',
}
# Arguments of litellm that may not be options: a request or another key of the table sets them.
NOT_OPTIONS: Final = frozenset(
    {"model", "messages", "input", "stream", "api_key", "api_base", "base_url", "timeout"}
)


def _url(value: str) -> str:
    parts = urlsplit(value)
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        # Only the host is shown: the rest may hold a password.
        raise ValueError(
            f"the URL of {parts.hostname or 'no host'} is not an http or https URL of host, port "
            "and path alone"
        )
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{value!r} has an invalid port; use a number up to 65535") from error
    return value.rstrip("/")


def _pattern(value: str) -> str:
    if value == "*":
        raise ValueError("a server for all other models has default = true, not *")
    if not value or "*" in value[:-1]:
        raise ValueError(
            f"{value!r} is not a model's name or prefix: a prefix ends in *, and has no other *"
        )
    return value


def _defaults(value: object) -> object:
    return parse_server_defaults(value) if isinstance(value, dict) else value


Url = Annotated[str, AfterValidator(_url)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class UpstreamSpec(BaseModel):
    """A table of the file: a server, or replicas that serve the same models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    kind: Literal["openai", "litellm"] = "openai"
    urls: tuple[Url, ...] = ()
    models: tuple[Pattern, ...] = ()
    default: StrictBool = False
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    api_key_header: Literal["authorization", "x-api-key"] | None = None
    provider: Annotated[str, Field(min_length=1)] | None = None
    options: dict[str, Any] = {}
    default_sampling: Annotated[dict[str, int | float], BeforeValidator(_defaults)] = {}
    tool_parser: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_reached(self) -> "UpstreamSpec":
        if not self.models and not self.default:
            raise ValueError("no request reaches it: give it models, or default = true")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names one replica twice")
        return self

    @model_validator(mode="after")
    def _has_the_keys_of_its_kind(self) -> "UpstreamSpec":
        if self.kind == "litellm":
            self._check_litellm()
            return self
        if not self.urls:
            raise ValueError(f"urls is missing; write {REMEDIES['urls']}")
        for url in self.urls:
            if not url.endswith("/v1"):
                raise ValueError(
                    f"urls: {url} does not end in /v1. For an API under another path use kind = "
                    '"litellm"'
                )
        for key in ("provider", "options"):
            if getattr(self, key):
                raise ValueError(f'{key} is for kind = "litellm" alone; leave it out')
        return self

    def _check_litellm(self) -> None:
        if len(self.urls) > 1:
            raise ValueError("urls: litellm takes one address only; write a table for each replica")
        if self.api_key_header is not None:
            raise ValueError("api_key_header: litellm chooses the header itself; leave it out")
        taken = sorted(NOT_OPTIONS & self.options.keys())
        if taken:
            raise ValueError(
                f"options.{taken[0]} is set by the request or by another key; leave it out"
            )

    @property
    def key_style(self) -> Style:
        """Return in which style of header the key is sent to this upstream."""
        of_anthropic = any(urlsplit(url).hostname == ANTHROPIC for url in self.urls)
        return self.api_key_header or ("anthropic" if of_anthropic else "authorization")


FILE: Final = TableFile(
    UpstreamSpec,
    TABLE,
    thing="server",
    remedies=REMEDIES,
    error=BadUpstreams,
    setting="PAWL_UPSTREAMS",
    unset="to use PAWL_UPSTREAM_URL alone",
)


def load_upstreams(path: Path, environment: Mapping[str, str]) -> tuple[UpstreamSpec, ...]:
    """Return the upstreams in a file, after checking that `environment` has all their keys.

    Raises:
        BadUpstreams: the file cannot be read or is invalid, or a key is not set.
    """
    specs = parse_upstreams(FILE.text_of(path), str(path))
    for spec in specs:
        if spec.api_key_env is not None and not environment.get(spec.api_key_env):
            raise BadUpstreams(
                f"{path}: upstream {spec.name!r}: api_key_env: the variable {spec.api_key_env} "
                "is not set; set it, or leave api_key_env out to pass the clients' own keys on"
            )
    return specs


def parse_upstreams(text: str, where: str) -> tuple[UpstreamSpec, ...]:
    """Return the upstreams in `text`; `where` names the file in messages.

    Raises:
        BadUpstreams: the text is not TOML, or a value in it is invalid.
    """
    specs = FILE.tables(text, where)
    problem = _conflict(specs)
    if problem is not None:
        raise BadUpstreams(f"{where}: {problem}")
    return specs


def _conflict(specs: Sequence[UpstreamSpec]) -> str | None:
    """Return an error message if two tables contradict each other, else None."""
    claims: dict[str, str] = {}
    for spec in specs:
        for pattern in spec.models:
            if pattern in claims:
                both = " and ".join(sorted({repr(claims[pattern]), repr(spec.name)}))
                return f"models: {pattern!r} is claimed twice, by {both}; leave it in one place"
            claims[pattern] = spec.name
    defaults = [repr(spec.name) for spec in specs if spec.default]
    if len(defaults) > 1:
        both = " and ".join(defaults)
        return f"default: {both} are both the default; keep default = true in one table"
    return None
