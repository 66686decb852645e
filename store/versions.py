"""Define the versions of policies, their states, and their events, as frozen values."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, get_args
from uuid import UUID

from store.records import Record
from store.tenants import DEFAULT

PolicyState = Literal[
    "written", "loaded", "canary", "serving", "retired", "rejected", "rolled_back"
]
# Who changes the state of a version: a trainer, the controller, a person, or an import.
Actor = Literal["trainer", "controller", "operator", "import"]

POLICY_STATES: Final[tuple[PolicyState, ...]] = get_args(PolicyState)
ACTORS: Final[tuple[Actor, ...]] = get_args(Actor)


class PolicyVersion(Record, frozen=True, kw_only=True):
    """One immutable version of a policy. Version 0 is the base model.

    `files_deleted` tells that its files were deleted, as nothing needed them. `tenant` is the
    policy's. `manifest_sha256` is the hash of its manifest, in hexadecimal, or None if it was not
    recorded. `kl_to_base` is its KL to the base model, in nats a token, on its training data; None
    if it was not measured. `throughput` is the speed of its update, as far as measured:
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
    # Its rule (`store.version_states.add_version`); None: it has none, or it was not read.
    gate: Mapping[str, Any] | None = None
    # A canary's share of new episodes; or the control's, which is the retired version that has one.
    share: float | None = None
    # Retired or rolled back, and no server keeps it for its episodes any more.
    unloaded: bool = False
    # A retraining started the policy's line again at an older version.
    ended: bool = False
    # It was judged, and a person has to promote or reject it.
    awaits_approval: bool = False

    @property
    def is_servable(self) -> bool:
        """Return whether every model server should have the version (its adapter, if any)."""
        return self.state not in ("written", "rejected") and not self.unloaded


class PolicyEvent(Record, frozen=True, kw_only=True):
    """One change of a version's state, with its reason; events are never altered.

    `from_state` is None for the version's first state. `evidence` has the data for the decision. An
    event whose two states are equal says what else happened to the version: for example, its policy
    was frozen (version 0), or it was unloaded or recalled.
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


# Columns are named: with `*`, a column that a newer Pawl adds would break prepared statements.
_READ: Final = (
    *("name", "version", "state", "served_name", "adapter_path", "update_id", "files_deleted_at"),
    *("tenant", "share", "unloaded_at", "ended_at", "awaits_approval_at"),
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
        gate=getattr(row, "gate", None),
        tenant=row.tenant,
        share=row.share,
        unloaded=row.unloaded_at is not None,
        ended=row.ended_at is not None,
        awaits_approval=row.awaits_approval_at is not None,
    )
