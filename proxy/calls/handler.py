"""Takes recorded calls: holds what all calls share, and turns each request into a `Call`."""

from time import perf_counter
from typing import Final

from proxy.calls.call import Call
from proxy.door.routes import Route
from proxy.http.exchange import Exchange
from proxy.identity.stitch import CallMemory
from proxy.intake.intake import Intake
from proxy.intake.reading import take_request
from proxy.policies.lookup import Lookup
from proxy.policies.versions import Versions
from proxy.spool.recorder import Recorder
from proxy.upstreams.members import Upstreams
from store.updates.policies import pinned_version

# Longest wait for the database to name an episode's version; a local one answers in 1 ms.
PIN_S: Final = 0.05


class Relay:
    """The parts that all calls of a worker share."""

    def __init__(
        self,
        upstreams: Upstreams,
        versions: Versions,
        recorder: Recorder,
        lookup: Lookup,
        *,
        intake: Intake,
        max_reply: int,
        default_temperature: float,
    ) -> None:
        """Store the parts.

        Args:
            upstreams: where calls are forwarded to.
            versions: which policy version serves an episode.
            recorder: where records go.
            lookup: questions to the database.
            intake: reads requests within their limits.
            max_reply: longest reply in one piece, in bytes.
            default_temperature: what the upstream samples with if a request names none.
        """
        self.upstreams = upstreams
        self.versions = versions
        self.recorder = recorder
        self._lookup = lookup
        self.stitches = CallMemory()
        self.intake = intake
        self.max_reply = max_reply
        self.default_temperature = default_temperature

    async def handle(self, exchange: Exchange, route: Route) -> None:
        """Answer one call and record it.

        Raises:
            TooLarge, BadRequest, Overloaded: its body was refused, as by `Intake.read`.
        """
        arrived = perf_counter()
        with self.intake.budget.claim() as claim:
            read = await take_request(self.intake, exchange, claim, route.speaks.turns)
            await Call(self, exchange, route, read, arrived, claim).run()

    async def learn_pin(self, model: str, episode: str) -> None:
        """Ask the database for the version of an episode that may have begun at another proxy.

        It is asked only while a policy has several servable versions, and for at most `PIN_S`.
        """
        if self.versions.knows(model, episode):
            return
        version = await self._lookup.ask(
            lambda connection: pinned_version(connection, model, episode), within_s=PIN_S
        )
        if version is not None:
            self.versions.pin(model, episode, version)
