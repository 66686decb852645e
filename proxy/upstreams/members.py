"""All upstreams of a proxy, and which of them answers for which model."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import structlog
from dotenv import dotenv_values

from proxy.errors import NoUpstream, ProxyError, UpstreamUnreachable
from proxy.http.wire import Headers
from proxy.settings import ProxySettings
from proxy.upstreams.file import UpstreamSpec, load_upstreams
from proxy.upstreams.keys import Key
from proxy.upstreams.litellm_upstream import LitellmUpstream
from proxy.upstreams.model_server import ModelServer
from proxy.upstreams.routing import ModelTable, shown
from proxy.upstreams.upstream import Upstream
from store.records import PolicyVersion

log = structlog.get_logger()

ONE: Final = "upstream"


class Member(msgspec.Struct, frozen=True):
    """One upstream: what it is called, what it answers for, and who answers."""

    name: str
    models: tuple[str, ...]
    default: bool
    server: ModelServer


class Upstreams:
    """Finds the one that a request goes to."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        defaults = [number for number, member in enumerate(members) if member.default]
        self._table = ModelTable(
            [member.models for member in members], defaults[0] if defaults else None
        )
        sole = members[0].server if len(members) == 1 and members[0].default else None
        # The only one there is takes everything, unread and streamed both ways.
        self.only = sole if isinstance(sole, Upstream) else None

    @property
    def keyed(self) -> bool:
        """Whether any goes with a key of ours, which every client of the proxy then shares."""
        servers = (member.server for member in self._members)
        return any(isinstance(server, Upstream) and server.keyed for server in servers)

    def for_model(self, model: str | None) -> ModelServer:
        """Who answers for `model`; None: for a request that names none.

        Raises:
            NoUpstream: nobody does.
        """
        if self.only is not None:
            return self.only
        return self._member(model).server

    def _member(self, model: str | None) -> Member:
        number = self._table.find(model)
        if number is not None:
            return self._members[number]
        known = ", ".join(self._table.known)
        asked = (
            "The request names no model" if model is None else f"There is no model {shown(model)!r}"
        )
        raise NoUpstream(
            f"{asked} here, and no upstream is the default. Ask for one of: {known}",
            param="model",
            code="model_not_found",
        )

    def learn(self, versions: Iterable[PolicyVersion]) -> None:
        """The store knows these; an adapter among them was loaded by our own trainer."""
        for version in versions:
            number = self._table.find(version.name)
            if version.version and number is not None:
                self._members[number].server.learn([version.served_name])

    async def models(self, headers: Headers) -> tuple[bytes, list[str]]:
        """The lists of all in one, each with what a request for it would reach; who is missing.

        Raises:
            UpstreamUnreachable: none gave its list.
        """
        lists = await asyncio.gather(*(self._listed(member, headers) for member in self._members))
        missing = [
            member.name for member, found in zip(self._members, lists, strict=True) if found is None
        ]
        if len(missing) == len(self._members):
            raise UpstreamUnreachable(
                f"No upstream gave its list of models: {', '.join(missing)}. Are they running?",
                code="upstream_unreachable",
            )
        listed = [entry for found in lists for entry in found or ()]
        return msgspec.json.encode({"object": "list", "data": listed}), missing

    async def _listed(self, member: Member, headers: Headers) -> list[msgspec.Raw] | None:
        try:
            found = await member.server.models(headers)
        except ProxyError as error:
            log.warning("models_unknown", upstream=member.name, reason=error.message)
            return None
        return [entry for name, entry in found.items() if self._reaches(name, member)]

    def _reaches(self, model: str, member: Member) -> bool:
        number = self._table.find(model)
        return number is not None and self._members[number] is member

    async def sweep(self) -> None:
        """For ever: see `ModelServer.sweep`."""
        await asyncio.gather(*(member.server.sweep() for member in self._members))

    async def close(self) -> None:
        """Close every connection."""
        for member in self._members:
            await member.server.close()


def check_upstreams(settings: ProxySettings) -> None:
    """See to it that a worker could open them.

    Raises:
        BadUpstreams: the file cannot be used, or asks for what is not installed.
    """
    for spec in _specs(settings, _environment()):
        if spec.kind == "litellm":
            LitellmUpstream.check(spec)


def open_upstreams(settings: ProxySettings) -> Upstreams:
    """Those of the file, or the one that PAWL_UPSTREAM_URL names.

    Raises:
        BadUpstreams: the file cannot be used.
    """
    if settings.upstreams is None:
        server = Upstream([str(settings.upstream_url)], silence_s=settings.silence_s)
        return Upstreams([Member(ONE, (), True, server)])
    environment = _environment()
    specs = _specs(settings, environment)
    return Upstreams(
        [
            Member(spec.name, spec.models, spec.default, _server(spec, settings, environment))
            for spec in specs
        ]
    )


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
        key=None if key is None else Key(key, spec.key_style),
        named_in=f"upstream {spec.name!r} of {settings.upstreams}",
    )


def _environment() -> dict[str, str]:
    """The process's, over what `.env` says: settings are read so, and keys stand beside them."""
    told = {name: value for name, value in dotenv_values(".env").items() if value is not None}
    return told | os.environ
