"""Make calls and rewards that come to the database at a time of their own."""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID

import msgspec

from store.ids import lowest_id_at
from store.records import Arm, SpoolRecord
from store.versions import PolicyState, PolicyVersion, policy_name
from tests.support.records import call, reward
from trainer.recipes.recipe import GateOptions

DELAY = timedelta(seconds=600)
RULE = GateOptions(
    mode="gated",
    canary_share=0.4,
    base_share=0.3,
    margin=0.2,
    reward_delay_s=DELAY.total_seconds(),
    fewest=10,
).model_dump(mode="json")
VERSIONS: dict[Arm, int] = {"base": 0, "serving": 1, "canary": 2}
BEGAN = datetime.now(UTC) - timedelta(hours=2)


class Arrival(NamedTuple):
    """Pair a record with when it comes to the database."""

    at: datetime
    record: SpoolRecord


def version(number: int, state: PolicyState) -> PolicyVersion:
    return PolicyVersion(
        name="m",
        version=number,
        state=state,
        served_name=policy_name("m", number, "m"),
        adapter_path=None,
        update_id=None,
    )


def begun(key: str, arm: Arm, at: datetime, number: int, served: int | None = None) -> Arrival:
    """Make the call of an episode of one call."""
    one = VERSIONS[arm] if served is None else served
    made = call(
        key,
        id=UUID(int=lowest_id_at(at).int + number),
        started_at=at,
        arm=arm,
        policy_version=one,
        served_model=policy_name("m", one, "m"),
    )
    return Arrival(at + timedelta(seconds=1), made)


def said(key: str, value: float, at: datetime) -> Arrival:
    return Arrival(at, msgspec.structs.replace(reward(value, episode=key), at=at))
