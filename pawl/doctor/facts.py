"""Define what the doctor knows of a system, as frozen values; what is away is empty."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from prometheus_client.samples import Sample

from store.adapter_slots import KeptVersion, Live
from store.claim_query import ClaimRule
from store.read.agreement import Agreement
from store.read.gates import Gated
from store.read.health import CallKind, EpisodeCounts, Tended, Unmatched
from store.records import Record
from store.versions import PolicyEvent, PolicyVersion
from trainer.recipes.recipe import Recipe
from trainer.updates.training_warnings import TrainingProblem, TrainingWarning

NOTHING: Final[Mapping[str, Any]] = {}


class Drain(Record, frozen=True, kw_only=True):
    """Hold what a proxy's `/readyz` says of the spool's way into the database."""

    state: str = ""
    for_s: float = 0.0
    reason: str = ""
    held: int = 0


class Ready(Record, frozen=True, kw_only=True):
    """Hold what `/readyz` says: a proxy the first five, a controller why versions are away."""

    status: str = ""
    database: str = ""
    workers: tuple[Any, ...] = ()
    drain: Drain = Drain()
    recording_outage_s: float = 0.0
    altered: Mapping[str, str] = {}
    unread: Mapping[str, str] = {}
    misserved: Mapping[str, Mapping[str, str]] = {}


class ProcessAnswer(Record, frozen=True, kw_only=True):
    """Describe what a process said on its admin port, or `why_not` it said nothing there.

    `samples` are empty where its `/metrics` asks for a key
    that is not ours (`asks_key`).
    """

    address: str = ""
    why_not: str | None = None
    asks_key: bool = False
    ready: Ready = Ready()
    samples: tuple[Sample, ...] = ()

    @property
    def answers(self) -> bool:
        """Return whether the process answered."""
        return self.why_not is None

    def values(self, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric with these labels, by what its other labels say."""
        return {
            " ".join(value for key, value in one.labels.items() if key not in labels): one.value
            for one in self.samples
            if one.name == name and labels.items() <= one.labels.items()
        }

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric with exactly these labels; None: it has none."""
        return self.values(name, **labels).get("")


class ReplicaAnswer(Record, frozen=True, kw_only=True):
    """Describe a replica of the model server: the models that it lists, or `why_not`."""

    url: str
    why_not: str | None = None
    models: Mapping[str, Mapping[str, Any]] = NOTHING
    slots: int | None = None


class Disk(Record, frozen=True, kw_only=True):
    """Say how much is free on the disk of a folder; `setting` names the folder."""

    setting: str
    folder: str
    free_gib: float


class PolicyFacts(Record, frozen=True, kw_only=True):
    """Hold what is stored of a policy that is to be trained.

    `recipe` and `rule` are None where the recipe cannot be read. `ready` are the episodes with a
    reward that may be claimed, and `updates` how many updates their signal suffices for. `servable`
    are the versions that servers should have, without those that changed a moment ago. `waits` is
    the event by which a version waits for a person. `judges` are those whose opinions are rewards.
    """

    about: Tended
    recipe: Recipe | None = None
    rule: ClaimRule | None = None
    counts: EpisodeCounts = EpisodeCounts()
    ready: int = 0
    updates: float = 0.0
    lacks: Mapping[str, int] = NOTHING
    problems: Mapping[TrainingWarning, TrainingProblem] = {}
    standing: Gated | None = None
    waits: PolicyEvent | None = None
    judges: tuple[Agreement, ...] = ()
    servable: tuple[PolicyVersion, ...] = ()
    live: Live | None = None
    kept: tuple[KeptVersion, ...] = ()

    @property
    def name(self) -> str:
        """Return the policy's name."""
        return self.about.name


class Facts(Record, frozen=True, kw_only=True):
    """Hold all that the doctor knows at the time `now`.

    `data_url` is where agents call. `unusable` are settings with a file that cannot be used, each
    with the reason. `tenant` is whose facts they are; None: all's. `database` is why it does not
    answer; `is_late`: it took too long for all questions. `unbegun` are policies of the file that
    no trainer ever began. `letters` are dead letters in the spool of this machine. `spinning` are
    environment variables by which waiting threads spin.
    """

    now: datetime
    data_url: str
    tenant: str | None = None
    proxy: ProcessAnswer = ProcessAnswer()
    trainer: ProcessAnswer = ProcessAnswer()
    controller: ProcessAnswer = ProcessAnswer()
    unusable: Mapping[str, str] = NOTHING
    database: str | None = None
    is_late: bool = False
    servers: tuple[ReplicaAnswer, ...] = ()
    disks: tuple[Disk, ...] = ()
    letters: int = 0
    spinning: Mapping[str, str] = NOTHING
    calls: tuple[CallKind, ...] = ()
    unmatched: Unmatched = Unmatched()
    policies: tuple[PolicyFacts, ...] = ()
    unbegun: tuple[str, ...] = ()

    @property
    def last_call_at(self) -> datetime | None:
        """Return when the newest call began; None: there is none lately."""
        return max((one.last_at for one in self.calls), default=None)
