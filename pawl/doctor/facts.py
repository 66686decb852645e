"""The doctor's facts about a system, as frozen values; empty for a part that is away."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from prometheus_client.samples import Sample

from store.adapter_slots import LiveCounts, VersionKeptForEpisodes
from store.claim_query import ClaimRule
from store.read.agreement import Agreement
from store.read.gates import GatedPolicy
from store.read.health import BegunPolicy, CallCount, EpisodeCounts, UnmatchedFeedback
from store.records import Record
from store.versions import PolicyEvent, PolicyVersion
from trainer.recipes.recipe import Recipe
from trainer.updates.training_warnings import TrainingProblem, TrainingWarning

NOTHING: Final[Mapping[str, Any]] = {}


class Drain(Record, frozen=True, kw_only=True):
    """The part of a proxy's `/readyz` about moving records from the spool to the database."""

    state: str = ""
    for_s: float = 0.0
    reason: str = ""
    held: int = 0


class Ready(Record, frozen=True, kw_only=True):
    """A reply of `/readyz`; only a controller's has those from `altered` on."""

    status: str = ""
    database: str = ""
    workers: tuple[Any, ...] = ()
    drain: Drain = Drain()
    recording_outage_s: float = 0.0
    altered: Mapping[str, str] = {}
    unread: Mapping[str, str] = {}
    misserved: Mapping[str, Mapping[str, str]] = {}
    waiting: Mapping[str, str] = {}


class ProcessAnswer(Record, frozen=True, kw_only=True):
    """The answer of a process on its admin port, or `why_not`, the reason for none.

    `samples` is empty if `/metrics` refused our key (`asks_key`).
    """

    address: str = ""
    why_not: str | None = None
    asks_key: bool = False
    ready: Ready = Ready()
    samples: tuple[Sample, ...] = ()

    @property
    def answers(self) -> bool:
        return self.why_not is None

    def values(self, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric with these labels, by the values of its other labels."""
        return {
            " ".join(value for key, value in one.labels.items() if key not in labels): one.value
            for one in self.samples
            if one.name == name and labels.items() <= one.labels.items()
        }

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric with exactly these labels, or None."""
        return self.values(name, **labels).get("")


class ReplicaAnswer(Record, frozen=True, kw_only=True):
    """The models that a replica of the model server lists; if it does not answer, `why_not`."""

    url: str
    why_not: str | None = None
    models: Mapping[str, Mapping[str, Any]] = NOTHING
    slots: int | None = None


class Disk(Record, frozen=True, kw_only=True):
    """Free space on the disk of a folder; `setting` is the setting with the folder."""

    setting: str
    folder: str
    free_gib: float


class PolicyFacts(Record, frozen=True, kw_only=True):
    """Stored facts about a policy to train.

    `rule` is the rule for claiming; it and `recipe` are None if the recipe cannot be read.
    `updates` is how many updates the waiting signal suffices for. `lacks` counts episodes with
    feedback and no reward, by reason. `servable` has the trained versions that servers should have,
    without recently changed ones. `waits` is the event that made a version wait for a person.
    `judges` has the agreement with facts of each judge that gave rewards, even if its rewards are
    ignored.
    """

    about: BegunPolicy
    recipe: Recipe | None = None
    rule: ClaimRule | None = None
    counts: EpisodeCounts = EpisodeCounts()
    updates: float = 0.0
    lacks: Mapping[str, int] = NOTHING
    problems: Mapping[TrainingWarning, TrainingProblem] = {}
    standing: GatedPolicy | None = None
    waits: PolicyEvent | None = None
    judges: tuple[Agreement, ...] = ()
    servable: tuple[PolicyVersion, ...] = ()
    live: LiveCounts | None = None
    kept: tuple[VersionKeptForEpisodes, ...] = ()

    @property
    def name(self) -> str:
        return self.about.name


class Facts(Record, frozen=True, kw_only=True):
    """All facts of the doctor at the time `now`.

    `data_url` is where agents call. `unusable` maps each setting whose file cannot be used to the
    reason. `tenant` limits the facts to one tenant (None: all). `database` is why the database
    cannot be used (None: it can); with `is_late` it did not answer all questions in time. `unbegun`
    are policies of the file that no trainer ever began. `letters` counts dead letters in the spool
    of this machine. `spinning` are environment variables that make waiting threads spin.
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
    calls: tuple[CallCount, ...] = ()
    unmatched: UnmatchedFeedback = UnmatchedFeedback()
    policies: tuple[PolicyFacts, ...] = ()
    unbegun: tuple[str, ...] = ()

    @property
    def last_call_at(self) -> datetime | None:
        """Return when the newest call began; None if there are no recent calls."""
        return max((one.last_at for one in self.calls), default=None)
