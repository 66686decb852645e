"""Take recorded calls: hold what all calls share, and turn each request into a `Call`."""

from time import perf_counter

from proxy.calls.asking import arrive
from proxy.calls.call import Call, Shared
from proxy.calls.recording import CallRecorder
from proxy.calls.routing import CallRouter
from proxy.door.routes import Route
from proxy.http.exchange import Exchange
from proxy.identity.stitch import CallMemory
from proxy.intake.intake import Intake
from proxy.intake.reading import take_request
from proxy.policies.lookup import Lookup
from proxy.policies.versions import Versions
from proxy.spool.recorder import Recorder
from proxy.upstreams.members import Upstreams


class CallHandler:
    """Answer the recorded calls of one worker."""

    def __init__(
        self,
        upstreams: Upstreams,
        versions: Versions,
        recorder: Recorder,
        lookup: Lookup,
        *,
        intake: Intake,
        max_reply: int,
        eval_tasks: str,
    ) -> None:
        """Store the parts.

        Args:
            upstreams: where calls are forwarded to.
            versions: which policy version serves an episode.
            recorder: where records go.
            lookup: questions to the database.
            intake: reads requests within their limits.
            max_reply: longest reply in one piece, in bytes.
            eval_tasks: how the names of tasks begin whose episodes are evaluation.
        """
        self.upstreams = upstreams
        self.intake = intake
        stitches = CallMemory()
        router = CallRouter(upstreams, versions, lookup, intake)
        self._shared = Shared(
            stitches,
            router,
            CallRecorder(recorder, stitches, router),
            max_reply,
            eval_tasks,
        )

    async def handle(self, exchange: Exchange, route: Route) -> None:
        """Answer one call and record it.

        Raises:
            TooLarge, BadRequest, Overloaded: its body was refused, as by `Intake.read`.
        """
        at = perf_counter()
        with self.intake.budget.claim() as claim:
            read = await take_request(self.intake, exchange, claim, route.speaks.turns)
            await Call(self._shared, arrive(exchange, route, read, at), claim).run()
