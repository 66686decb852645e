"""Choose the upstream that answers for a model."""

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
from dotenv import dotenv_values

from proxy.errors import NoUpstream, ProxyError, UpstreamUnreachable
from proxy.formats.sampling import has_grammars, tag_model
from proxy.http.wire import Headers
from proxy.settings import ProxySettings
from proxy.upstreams.file import UpstreamSpec, load_upstreams
from proxy.upstreams.litellm import LitellmUpstream
from proxy.upstreams.server import Upstream, UpstreamKey
from store.settings import secrets_folder
from store.versions import PolicyVersion

log = structlog.get_logger()

# A version's name is its policy's name and @N. Some vendors' models have a date after an @.
_VERSION: Final = re.compile(r"(.+)@\d+\Z", re.DOTALL)

# Most characters of a request's text that an error message quotes.
_MOST_SHOWN: Final = 200


def shortened(text: str) -> str:
    """Return a text of a request for an error message, shortened if it is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


class ModelTable:
    """Map a model's name to the number of the upstream that claims it.

    The name itself is looked up first, then the name without `@N` (a version's policy), then the
    longest claimed prefix, then the default.
    """

    def __init__(self, claims: Iterable[Iterable[str]], default: int | None) -> None:
        """Build the table from each upstream's patterns and the default upstream's number."""
        self._exact: dict[str, int] = {}
        prefixes: dict[str, int] = {}
        for number, patterns in enumerate(claims):
            for pattern in patterns:
                if pattern.endswith("*"):
                    prefixes[pattern[:-1]] = number
                else:
                    self._exact[pattern] = number
        self._prefixes: Mapping[str, int] = dict(
            sorted(prefixes.items(), key=lambda claim: len(claim[0]), reverse=True)
        )
        self.default = default
        self.known = (*self._exact, *(f"{prefix}*" for prefix in prefixes))

    def find(self, model: str | None) -> int | None:
        """Return the number of the model's upstream, or None if no upstream answers for it."""
        if model is None:
            return self.default
        number = self._exact.get(model)
        if number is None:
            version = _VERSION.match(model)
            number = self._exact.get(version[1]) if version is not None else None
        if number is not None:
            return number
        for prefix, claimed_by in self._prefixes.items():
            if model.startswith(prefix):
                return claimed_by
        return self.default


SOLE_NAME: Final = "upstream"
TEMPERATURE: Final = "temperature"


# The two kinds of upstream; `Upstream` documents the methods.
ModelServer = Upstream | LitellmUpstream


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The sampling settings that a server uses where a request states none.

    `tool_grammars` says whether the server may constrain tool calls by a grammar, and `tool_tag` in
    which syntax, if known.
    """

    temperature: float = 1.0
    others: Mapping[str, float] = {}
    tool_grammars: bool = True
    tool_tag: str | None = None


# vLLM's defaults, unless the model's folder has others.
VLLMS_DEFAULTS: Final = SamplingDefaults()


class UpstreamMember(msgspec.Struct, frozen=True):
    """One upstream: its name, the models it claims, and the server or library that answers."""

    name: str
    models: tuple[str, ...]
    default: bool
    server: ModelServer
    sampling_defaults: SamplingDefaults = VLLMS_DEFAULTS


class Upstreams:
    """All upstreams: find the one for a request's model, and join their lists of models."""

    def __init__(self, members: Sequence[UpstreamMember]) -> None:
        """Build the table of models from the upstreams' claims."""
        self._members = members
        defaults = [number for number, member in enumerate(members) if member.default]
        self._table = ModelTable(
            [member.models for member in members], defaults[0] if defaults else None
        )
        self._sole = members[0] if len(members) == 1 and members[0].default else None
        sole = None if self._sole is None else self._sole.server
        # A sole upstream gets every request: bodies need not be read, and are streamed both ways.
        self.only = sole if isinstance(sole, Upstream) else None

    @property
    def sends_own_key(self) -> bool:
        """Return whether requests to any upstream carry the proxy's own key."""
        servers = (member.server for member in self._members)
        return any(isinstance(server, Upstream) and server.sends_own_key for server in servers)

    def for_model(self, model: str | None) -> ModelServer:
        """Return the server for `model`; None stands for a request that names no model.

        Raises:
            NoUpstream: no upstream answers for it.
        """
        if self.only is not None:
            return self.only
        return self._member(model).server

    def _member(self, model: str | None) -> UpstreamMember:
        number = self._table.find(model)
        if number is not None:
            return self._members[number]
        known = ", ".join(self._table.known)
        problem = (
            "The request names no model"
            if model is None
            else f"There is no model {shortened(model)!r}"
        )
        raise NoUpstream(
            f"{problem} here, and no upstream is the default. Ask for one of: {known}",
            param="model",
            code="model_not_found",
        )

    def sampling_defaults(self, model: str | None) -> SamplingDefaults:
        """Return the sampling defaults of the server for `model`."""
        if self._sole is not None:
            return self._sole.sampling_defaults
        number = self._table.find(model)
        return VLLMS_DEFAULTS if number is None else self._members[number].sampling_defaults

    def learn(self, versions: Iterable[PolicyVersion]) -> None:
        """Tell the upstreams which of the database's versions are adapters of our own trainer.

        A policy's adapters are at the upstream of its base model, which is its version 0.
        """
        known = list(versions)
        bases = {version.name: version.served_name for version in known if not version.version}
        for version in known:
            number = self._table.find(bases.get(version.name, version.name))
            if version.version and number is not None:
                self._members[number].server.learn([version.served_name])

    async def models(
        self, headers: Headers, is_hidden: Callable[[str], bool] | None = None
    ) -> tuple[bytes, list[str]]:
        """Return one list of all upstreams' models, and the names of upstreams that gave no list.

        A model is listed by the upstream to which requests for it go, unless `is_hidden(model)`.

        Raises:
            UpstreamUnreachable: no upstream gave its list.
        """
        lists = await asyncio.gather(*(self._listed(member, headers) for member in self._members))
        missing = [
            member.name
            for member, entries in zip(self._members, lists, strict=True)
            if entries is None
        ]
        if len(missing) == len(self._members):
            raise UpstreamUnreachable(
                f"No upstream gave its list of models: {', '.join(missing)}. Are they running?",
                code="upstream_unreachable",
            )
        listed = [
            entry
            for entries in lists
            for name, entry in (entries or {}).items()
            if is_hidden is None or not is_hidden(name)
        ]
        return msgspec.json.encode({"object": "list", "data": listed}), missing

    async def _listed(
        self, member: UpstreamMember, headers: Headers
    ) -> dict[str, msgspec.Raw] | None:
        try:
            listed = await member.server.models(headers)
        except ProxyError as error:
            log.warning("models_unknown", upstream=member.name, reason=error.message)
            return None
        number = self._members.index(member)
        return {name: entry for name, entry in listed.items() if self._table.find(name) == number}

    async def sweep(self) -> None:
        """Close idle and silent connections of all upstreams periodically; never return."""
        await asyncio.gather(*(member.server.sweep() for member in self._members))

    async def close(self) -> None:
        """Close every connection."""
        for member in self._members:
            await member.server.close()


def check_upstreams(settings: ProxySettings) -> None:
    """Check that a worker could open the configured upstreams.

    Raises:
        BadUpstreams: the file cannot be used, or names a library that is not installed.
    """
    for spec in _specs(settings, _environment(settings.secrets_dir)):
        if spec.kind == "litellm":
            LitellmUpstream.check(spec)


def open_upstreams(settings: ProxySettings) -> Upstreams:
    """Return the upstreams of the file, or the one at PAWL_UPSTREAM_URL if there is no file.

    Raises:
        BadUpstreams: the file cannot be used.
    """
    if settings.upstreams is None:
        server = Upstream([str(settings.upstream_url)], silence_s=settings.silence_s)
        return Upstreams(
            [UpstreamMember(SOLE_NAME, (), True, server, _defaults(settings, {}, None))]
        )
    environment = _environment(settings.secrets_dir)
    specs = _specs(settings, environment)
    return Upstreams(
        [
            UpstreamMember(
                spec.name,
                spec.models,
                spec.default,
                _server(spec, settings, environment),
                _defaults(settings, spec.default_sampling, spec.tool_parser),
            )
            for spec in specs
        ]
    )


def _defaults(
    settings: ProxySettings, own: dict[str, float], tool_parser: str | None
) -> SamplingDefaults:
    """Return the settings' defaults, overridden by an upstream's `own` ones and its tool parser."""
    others = settings.sampling_defaults | own
    temperature = others.pop(TEMPERATURE)
    parser = tool_parser or settings.tool_parser
    return SamplingDefaults(temperature, others, has_grammars(parser), tag_model(parser))


def _specs(settings: ProxySettings, environment: Mapping[str, str]) -> tuple[UpstreamSpec, ...]:
    return () if settings.upstreams is None else load_upstreams(settings.upstreams, environment)


def _server(
    spec: UpstreamSpec, settings: ProxySettings, environment: Mapping[str, str]
) -> ModelServer:
    key = None if spec.api_key_env is None else environment[spec.api_key_env]
    if spec.kind == "litellm":
        return LitellmUpstream(spec, key, silence_s=settings.silence_s)
    return Upstream(
        spec.urls,
        silence_s=settings.silence_s,
        key=None if key is None else UpstreamKey(key, spec.key_style),
        called=f"Upstream {spec.name!r}",
    )


def _environment(secrets: Path | None) -> dict[str, str]:
    """Return the variables of the environment, of `.env` and of the secrets folder.

    Earlier ones take precedence, as when settings are read.
    """
    from_file = {name: value for name, value in dotenv_values(".env").items() if value is not None}
    folder = secrets_folder(secrets)
    files = folder.iterdir() if folder else ()
    # Other users' files may be unreadable.
    readable = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
    values = {file.name: file.read_text(errors="replace").strip() for file in readable}
    return values | from_file | os.environ
