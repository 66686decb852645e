"""Define what clients, publisher and ledger tell of a run."""

from datetime import datetime

from store.records import Record


class Call(Record, frozen=True, kw_only=True):
    """Describe a call as its client saw it; times are of `time.monotonic`.

    `id` and `version` are what the reply's headers say. `first` is when the first chunk with text
    came. `why` says what was wrong with it; None: nothing.
    """

    episode: str
    began: float
    ended: float
    id: str = ""
    version: str = ""
    first: float | None = None
    why: str | None = None


class Gap(Record, frozen=True, kw_only=True):
    """Hold the seconds between two chunks of a reply, and when the second came."""

    at: float
    seconds: float


class Load(Record, frozen=True, kw_only=True):
    """Say when a version's weights were ready, its files were recorded, and it got the traffic.

    A version that was `rejected` has the reason there.
    """

    version: str
    step: float
    recorded: float
    promoted: float
    rejected: str | None = None


class Unload(Record, frozen=True, kw_only=True):
    """Say when the model server no longer had a version."""

    version: str
    at: float


class Seen(Record, frozen=True, kw_only=True):
    """Say how many adapters the model server had at a moment."""

    at: float
    loaded: int


class Waited(Record, frozen=True, kw_only=True):
    """Say that a load had to wait for a free adapter slot from a moment on."""

    at: float


Event = Load | Unload | Seen | Waited


class Stored(Record, frozen=True, kw_only=True):
    """Describe a call as the ledger has it; `at` is when it began."""

    id: str
    episode: str
    version: int
    at: datetime
