"""Define the versions of policies, their states, and what changes these, as frozen values."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, get_args
from uuid import UUID

from store.records import Record
from store.tenants import DEFAULT

PolicyState = Literal[
    "written",
    "ready",
    "candidate",
    "canary",
    "serving",
    "published",
    "rolled_back",
    "retired",
    "rejected",
]
# The states in which an episode may keep a version, which every model server has loaded for it.
WITH_TRAFFIC: Final[tuple[PolicyState, ...]] = ("serving", "canary", "published", "rolled_back")
# The states of versions whose adapters every model server should have loaded.
SERVABLE: Final[tuple[PolicyState, ...]] = (*WITH_TRAFFIC, "ready", "candidate")
# Those of versions that will not be served any more.
UNSERVED: Final[tuple[PolicyState, ...]] = ("retired", "rejected")
# Who changes the state of a version: a trainer, the controller that judges it, a person, or whoever
# brought it from elsewhere.
Actor = Literal["trainer", "controller", "operator", "import"]

POLICY_STATES: Final[tuple[PolicyState, ...]] = get_args(PolicyState)
ACTORS: Final[tuple[Actor, ...]] = get_args(Actor)


class PolicyVersion(Record, frozen=True, kw_only=True):
    """Describe one immutable version of a policy. Version 0 is the base model.

    `files_deleted` says that its files are gone, as nothing could ask for them any more. The policy
    is the `tenant`'s. `manifest_sha256` is the hash of its manifest, in hexadecimal digits, or None
    if it was not recorded.
    `kl_to_base` is how far it is from the base model, in nats a token on what it was trained on;
    None if that was not measured. `throughput` is how fast its update trained, as far as measured:
    `tokens_per_second`, `mfu` and `idle_share`.
    """

    name: str
    version: int
    state: PolicyState
    served_name: str
    adapter_path: str | None
    update_id: UUID | None
    files_deleted: bool = False
    tenant: str = DEFAULT
    manifest_sha256: str | None = None
    kl_to_base: float | None = None
    throughput: Mapping[str, float] = {}
    # How far what is served of it may be from what was trained, by the recipe that made it.
    probe_tolerance: float | None = None
    # Of a canary, its share of new episodes; of version 0, the share that stays on the base model.
    share: float | None = None
    # It lost the gate, or fell behind later: nothing is trained from it, or on its episodes.
    rolled_back: bool = False
    # A retraining started the policy's line again at an older version.
    ended: bool = False


class PolicyEvent(Record, frozen=True, kw_only=True):
    """State one change of a version's state, with its reason; it is written once, for good.

    `from_state` is None for the version's first state. `evidence` is what the decision rested on.
    A policy that is frozen, or no longer, has such an event of its version 0, whose state stays.
    """

    id: UUID
    name: str
    version: int
    from_state: PolicyState | None
    to_state: PolicyState
    reason: str
    actor: Actor
    evidence: Mapping[str, Any] | None
    at: datetime


def policy_name(policy: str, version: int, base_name: str) -> str:
    """Return the name that a version is served under: the base model's own, or `NAME@N`."""
    return base_name if version == 0 else f"{policy}@{version}"


# Named, so that a column that a newer version of Pawl adds ends no prepared statement.
_READ: Final = (
    *("name", "version", "state", "served_name", "adapter_path", "update_id", "files_deleted_at"),
    *("tenant", "share", "rolled_back_at", "ended_at"),
)
# The columns of a row of `policies p` that `version_of` reads.
VERSION_COLUMNS: Final = ", ".join(f"p.{name}" for name in _READ)


def version_of(row: Any) -> PolicyVersion:
    """Return a row of `policies` as a record; figures of its update may be missing in the row."""
    return PolicyVersion(
        name=row.name,
        version=row.version,
        state=row.state,
        served_name=row.served_name,
        adapter_path=row.adapter_path,
        update_id=row.update_id,
        files_deleted=row.files_deleted_at is not None,
        manifest_sha256=getattr(row, "manifest_sha256", None),
        kl_to_base=getattr(row, "kl_to_base", None),
        throughput=getattr(row, "throughput", None) or {},
        probe_tolerance=getattr(row, "probe_tolerance", None),
        tenant=row.tenant,
        share=row.share,
        rolled_back=row.rolled_back_at is not None,
        ended=row.ended_at is not None,
    )
