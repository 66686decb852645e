"""Take the second step of a call: choose version and upstream, and fit the request to both."""

from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from proxy.calls.asking import Arrived
from proxy.errors import NotServed
from proxy.exploring import Changes, Exploring, explored, is_chosen
from proxy.formats.base import ModelRequest
from proxy.http.wire import Headers, for_upstream
from proxy.identity.identify import Identity
from proxy.intake import Intake
from proxy.lookup import Lookup
from proxy.policies.versions import Serving, Versions
from proxy.tenants import check_call, check_headers, check_query
from proxy.upstreams.replies import Reply
from proxy.upstreams.upstreams import ModelServer, SamplingDefaults, Upstreams
from store.records import EVAL
from store.version_queries import pinned_version

# Longest wait for the database to name an episode's version; a local one answers in 1 ms.
PIN_S: Final = 0.05
NOBODY: Final = Serving(None, None, None)
# The status by which a model server says that it has no such model.
UNKNOWN_MODEL: Final = 404


class Routed(msgspec.Struct, frozen=True):
    """Name the policy version that serves a call, with the request as the upstream gets it.

    `explored` is what exploration changed of the request, None if it changed nothing. `changed`
    says whether the upstream gets other bytes than the client sent: what a change adds to the reply
    can only be removed if the reply is not compressed.
    """

    serving: Serving
    request: ModelRequest
    explored: Changes | None = None
    changed: bool = False


class CallRouter:
    """Choose version and upstream of one worker's calls, and rewrite their requests for both."""

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
        self.owners = versions.owners
        self._lookup = lookup
        self._intake = intake
        # Policies are those that the worker began with.
        self._explore = versions.explore

    def version_of(self, arrived: Arrived, identity: Identity) -> Serving:
        """Choose the policy version that serves a call, and whether its episode explores.

        What the request names must have been checked before (`check`).
        """
        model, episode, agent = arrived.request.model, identity.follows, identity.agent
        tenant = arrived.exchange.tenant
        serving = self._versions.resolve(
            model, episode, agent, tenant, identity.split, is_unnamed=episode == arrived.own
        )
        if not self._explore or model is None or identity.split == EVAL:
            return serving
        rule = self._versions.exploration(model, agent, tenant)
        if rule is None or not is_chosen(episode, rule.share):
            return serving
        exploring = Exploring(rule, self.sampling_defaults(arrived, serving))
        return msgspec.structs.replace(serving, exploring=exploring)

    def unpinned(self, arrived: Arrived, identity: Identity) -> str | None:
        """Return a call's policy if only the database may know which version its episode keeps.

        That is so only while the policy has several servable versions.
        """
        model, follows = arrived.request.model, identity.follows
        if follows == arrived.own or model is None:
            return None
        policy = self._versions.trained_policy(model, identity.agent, arrived.exchange.tenant)
        return None if policy is None or self._versions.knows(policy, follows) else policy

    async def learn_pin(self, policy: str, episode: str) -> None:
        """Ask the database for the version of an episode that may have begun at another proxy.

        It is asked for at most `PIN_S`.
        """
        version = await self._lookup.ask(
            lambda connection: pinned_version(connection, policy, episode), within_s=PIN_S
        )
        if version is not None:
            self._versions.pin(policy, episode, version)

    def lacks_version(self, serving: Serving, reply: Reply) -> bool:
        """Return whether the upstream may lack a version that the store lists as servable."""
        return reply.status == UNKNOWN_MODEL and self.is_servable(serving)

    def is_servable(self, serving: Serving) -> bool:
        """Return whether the store lists a call's version as one that every replica should have."""
        return self._versions.is_servable(serving)

    def why_not_served(self, arrived: Arrived, serving: Serving) -> str | None:
        """Return what is known of a version that the request names, unless it is servable.

        The result is None if the request names none.
        """
        if self._versions.is_servable(serving):
            return None
        return self._versions.why_not_served(arrived.request.model)

    def check_served(self, arrived: Arrived, serving: Serving, reply: Reply) -> None:
        """Check that a version which the request names is served.

        Raises:
            NotServed: the upstream does not have it.
        """
        if reply.status != UNKNOWN_MODEL:
            return
        why = self.why_not_served(arrived, serving)
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

    async def check(self, arrived: Arrived) -> None:
        """Check that a call names nothing that is hidden from its tenant, as `check_call` does.

        Raises:
            NotServed, BadRequest: it does, or it is not known whether it does.
        """
        exchange, owners = arrived.exchange, self.owners
        if exchange.tenant == owners.sole:
            return
        check_headers(owners, exchange.tenant, exchange.headers)
        check_query(owners, exchange.tenant, exchange.target)
        path, headers, request = arrived.route.path, exchange.headers, arrived.request
        if arrived.takes_long:
            await self._intake.beside(check_call, owners, exchange.tenant, path, headers, request)
        else:
            check_call(owners, exchange.tenant, path, headers, request)

    async def rewritten_beside(self, arrived: Arrived, serving: Serving, want_ids: bool) -> Routed:
        """Return what `rewritten` does, which takes long, without holding up the event loop."""
        return await self._intake.beside(rewritten, arrived, serving, want_ids)


def unrouted(arrived: Arrived) -> Routed:
    """Return what is known before a version was chosen: nobody serves it, nothing is changed."""
    return Routed(NOBODY, arrived.request)


def without_ids(arrived: Arrived, routed: Routed) -> Routed:
    """Return the call with its request as the client wrote it, but for the model's name."""
    return rewritten(arrived, routed.serving, False)


def rewritten(arrived: Arrived, serving: Serving, want_ids: bool) -> Routed:
    """Return the call with its request rewritten for the version and the upstream."""
    if serving.exploring is not None and want_ids:
        exploring = _exploring(arrived, serving, serving.exploring)
        if exploring is not None:
            return exploring
    request = arrived.format.rewrite(arrived.request, serving.served_name, want_ids=want_ids)
    return Routed(serving, request, changed=request.body is not arrived.request.body)


def _exploring(arrived: Arrived, serving: Serving, exploring: Exploring) -> Routed | None:
    """Return the call with its request rewritten to explore, or None if it does not explore.

    A request that must get no fields for ids could not be trained on. One that has them of its own
    is left alone too: whoever reads token ids measures what was asked for.
    """
    changed = explored(arrived.request, arrived.format, exploring)
    if changed is None:
        return None
    request = arrived.format.rewrite(changed.request, serving.served_name, want_ids=True)
    if not request.injected:
        return None
    return Routed(serving, request, changed.changes, changed=True)


def send(upstream: ModelServer, arrived: Arrived, routed: Routed) -> Coroutine[Any, Any, Reply]:
    """Send the request to its upstream, and return the reply once its head has come.

    Raises:
        ProxyError: there is no reply, as `ModelServer.ask` says.
    """
    return upstream.ask("POST", *_sent(arrived, routed))


def send_where_served(
    upstream: ModelServer, arrived: Arrived, routed: Routed
) -> Coroutine[Any, Any, Reply | None]:
    """Do what `send` does at a replica that lists the version; return None if there is none."""
    name = routed.serving.served_name or ""
    return upstream.ask_where_served(name, "POST", *_sent(arrived, routed))


def _sent(arrived: Arrived, routed: Routed) -> tuple[str, Headers, bytes]:
    """Return the target, headers and body that the upstream gets."""
    exchange, request = arrived.exchange, routed.request
    headers = for_upstream(exchange.headers, exchange.tenant, plain=routed.changed)
    target = request.path or arrived.route.path
    query = exchange.target.partition("?")[2]
    if query:
        target = f"{target}?{query}"
    return target, headers, request.body
