"""Policy versions as the store would list them."""

from typing import Any

from store.versions import PolicyState, PolicyVersion


def version(
    number: int, state: PolicyState, name: str = "m", base: str | None = None, **more: Any
) -> PolicyVersion:
    return PolicyVersion(
        name=name,
        version=number,
        state=state,
        served_name=f"{name}@{number}" if number else base or name,
        adapter_path=None,
        update_id=None,
        rolled_back=state == "rolled_back",
        **more,
    )


def numbered(*states: PolicyState, name: str = "m", base: str | None = None) -> list[PolicyVersion]:
    """Return a policy's versions from 0 on, one for each state."""
    return [version(number, state, name, base) for number, state in enumerate(states)]
