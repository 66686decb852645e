"""Takes recorded calls in: what every call needs, and the way from a request to its `Call`."""

from time import perf_counter
from typing import Final

from proxy.call import Call
from proxy.http.exchange import Exchange
from proxy.identity.stitch import Stitches
from proxy.intake.intake import Intake
from proxy.intake.reading import take_request
from proxy.lookup import Lookup
from proxy.recorder import Recorder
from proxy.routes import Route
from proxy.upstreams.members import Upstreams
from proxy.versions import Versions
from store.policies import pinned_version

# How long a call may wait to be told its episode's version; a local answer takes 1 ms.
PIN_S: Final = 0.05


class Relay:
    """What every call needs."""

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
        self.upstreams = upstreams
        self.versions = versions
        self.recorder = recorder
        self._lookup = lookup
        self.stitches = Stitches()
        self.intake = intake
        self.max_reply = max_reply
        self.default_temperature = default_temperature

    async def handle(self, exchange: Exchange, route: Route) -> None:
        """Answer one call and record it.

        Raises:
            TooLarge, BadRequest, Overloaded: its body is not taken in (see `Intake.read`).
        """
        arrived = perf_counter()
        with self.intake.budget.claim() as claim:
            read = await take_request(self.intake, exchange, claim)
            await Call(self, exchange, route, read, arrived, claim).run()

    async def learn_pin(self, model: str, episode: str) -> None:
        """Ask the ledger for the version of an episode that may have begun at another proxy.

        Only while a policy has several versions that can be served, and never for long.
        """
        if self.versions.knows(model, episode):
            return
        version = await self._lookup.ask(
            lambda connection: pinned_version(connection, model, episode), within_s=PIN_S
        )
        if version is not None:
            self.versions.pin(model, episode, version)
