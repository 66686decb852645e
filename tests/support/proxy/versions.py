"""Policy versions as the store would list them."""

from typing import Any, Literal

from store.versions import PolicyState, PolicyVersion

# A version that is retired, and that no server keeps, is `unloaded` here.
State = PolicyState | Literal["unloaded"]


def version(
    number: int, state: State, name: str = "m", base: str | None = None, **more: Any
) -> PolicyVersion:
    return PolicyVersion(
        name=name,
        version=number,
        state="retired" if state == "unloaded" else state,
        served_name=f"{name}@{number}" if number else base or name,
        adapter_path=None,
        update_id=None,
        unloaded=state == "unloaded",
        **more,
    )


def numbered(*states: State, name: str = "m", base: str | None = None) -> list[PolicyVersion]:
    """Return a policy's versions from 0 on, one for each state."""
    return [version(number, state, name, base) for number, state in enumerate(states)]
