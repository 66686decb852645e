"""The second step of a call: the version that serves it, the upstream, and the request for both."""

from typing import Final

import msgspec

from proxy.calls.asking import Arrived
from proxy.errors import NotServed
from proxy.formats.base import ModelRequest
from proxy.http.wire import for_upstream
from proxy.identity.identify import Identity
from proxy.intake.intake import Intake
from proxy.policies.lookup import Lookup
from proxy.policies.versions import Serving, Versions
from proxy.upstreams.members import SamplingDefaults, Upstreams
from proxy.upstreams.model_server import ModelServer, Reply
from store.updates.policies import pinned_version

# Longest wait for the database to name an episode's version; a local one answers in 1 ms.
PIN_S: Final = 0.05
NOBODY: Final = Serving(None, None, None)
# The status by which a model server says that it has no such model.
UNKNOWN_MODEL: Final = 404


class Routed(msgspec.Struct, frozen=True):
    """The policy version that serves a call, and the request as the upstream gets it."""

    serving: Serving
    request: ModelRequest


class CallRouter:
    """Chooses version and upstream of one worker's calls, and rewrites their requests for both."""

    def __init__(
        self, upstreams: Upstreams, versions: Versions, lookup: Lookup, intake: Intake
    ) -> None:
        """Store where calls are forwarded to, what serves them, and where to look pins up.

        Args:
            upstreams: where calls are forwarded to.
            versions: which policy version serves an episode.
            lookup: questions to the database.
            intake: runs what takes long beside the event loop.
        """
        self._upstreams = upstreams
        self._versions = versions
        self._lookup = lookup
        self._intake = intake

    async def version_of(self, arrived: Arrived, identity: Identity) -> Serving:
        """Choose the policy version that serves a call."""
        model, follows, agent = arrived.request.model, identity.follows, identity.agent
        if follows != arrived.name and model is not None:
            policy = self._versions.trained_policy(model, agent)
            if policy is not None:
                await self._learn_pin(policy, follows)
        return self._versions.resolve(model, follows, agent)

    async def _learn_pin(self, policy: str, episode: str) -> None:
        """Ask the database for the version of an episode that may have begun at another proxy.

        It is asked only while a policy has several servable versions, and for at most `PIN_S`.
        """
        if self._versions.knows(policy, episode):
            return
        version = await self._lookup.ask(
            lambda connection: pinned_version(connection, policy, episode), within_s=PIN_S
        )
        if version is not None:
            self._versions.pin(policy, episode, version)

    def check_served(self, arrived: Arrived, reply: Reply) -> None:
        """Check that a version which the request names is served.

        Raises:
            NotServed: the upstream does not have it.
        """
        if reply.status != UNKNOWN_MODEL:
            return
        why = self._versions.why_not_served(arrived.request.model)
        if why is not None:
            reply.discard()
            raise NotServed(why, param="model", code="model_not_found")

    def upstream_of(self, arrived: Arrived, serving: Serving) -> ModelServer:
        """Return the upstream of a call: a policy is served where its base model is.

        Raises:
            ProxyError: no upstream serves the model.
        """
        return self._upstreams.for_model(self._upstreams_model(arrived, serving))

    def sampling_defaults(self, arrived: Arrived, serving: Serving) -> SamplingDefaults:
        """Return what the call's upstream samples with if the request does not say."""
        return self._upstreams.sampling_defaults(self._upstreams_model(arrived, serving))

    def _upstreams_model(self, arrived: Arrived, serving: Serving) -> str | None:
        """Return the model by whose name the call's upstream is found."""
        policy = serving.policy
        return arrived.request.model if policy is None else self._versions.base_of(policy)

    async def rewritten(self, arrived: Arrived, serving: Serving, *, want_ids: bool) -> Routed:
        """Return the call with its request rewritten, beside the event loop if it takes long."""
        if arrived.read.takes_long:
            return await self._intake.beside(_rewrite, arrived, serving, want_ids)
        return _rewrite(arrived, serving, want_ids)


def unrouted(arrived: Arrived) -> Routed:
    """Return what is known before a version was chosen: nobody serves it, nothing is changed."""
    return Routed(NOBODY, arrived.request)


def without_ids(arrived: Arrived, routed: Routed) -> Routed:
    """Return the call with its request as the client wrote it, but for the model's name."""
    return _rewrite(arrived, routed.serving, False)


def _rewrite(arrived: Arrived, serving: Serving, want_ids: bool) -> Routed:
    rewritten = arrived.format.rewrite(arrived.request, serving.served_name, want_ids=want_ids)
    return Routed(serving, rewritten)


def is_changed(arrived: Arrived, routed: Routed) -> bool:
    """Return whether the request was changed, so that the reply must be readable."""
    return routed.request.body is not arrived.request.body


async def send(upstream: ModelServer, arrived: Arrived, routed: Routed) -> Reply:
    """Send the request to its upstream, and return the reply once its head has come.

    Raises:
        ProxyError: there is no reply, as `ModelServer.ask` says.
    """
    exchange, request = arrived.exchange, routed.request
    # What a change adds to the reply can only be removed if the reply is not compressed.
    headers = for_upstream(exchange.headers, plain=is_changed(arrived, routed))
    target = request.path or arrived.route.path
    query = exchange.target.partition("?")[2]
    if query:
        target = f"{target}?{query}"
    return await upstream.ask("POST", target, headers, request.body)
