"""Read the TOML file of policies: the calls that each answers, its base model, and its training.

Proxy and trainer both read it (`PAWL_POLICIES`). Parsing is pure; `open_policies` reads the file.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from store.errors import BadPolicies
from store.tenants import DEFAULT, PATTERN
from store.toml_file import TableFile

TABLE: Final = "policy"
REMEDIES: Final[Mapping[str, str]] = {
    "name": 'name = "writer", of letters, digits and . _ -',
    "base": 'base = "qwen", as the model server lists it',
    "agents": 'agents = ["writer"], as clients name them',
    "models": 'models = ["my-writer"], as clients ask for them',
    "trained": "trained = false, for a policy that stays the base model",
    "recipe": 'recipe = "default", or the path of a TOML file',
    "explore": "explore = { share = 0.1, temperature = 0.7 }, or with drop_strict = true",
    "explore.share": "share = 0.1, of all episodes: above 0, up to 1",
    "explore.temperature": "temperature = 0.7, or another from 0.1 to 2",
    "explore.drop_strict": "drop_strict = true",
    "publish_with": 'publish_with = ["checker"], trained policies of this file',
    "tenant": 'tenant = "team-a", as in `pawl keys create --tenant`',
}
Name = Annotated[str, Field(min_length=1)]


class Explore(BaseModel):
    """How a policy explores: the share of its episodes, and the changes to their calls.

    A lower temperature is raised to `temperature`; `drop_strict` removes `strict` from tools.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    share: Annotated[float, Field(gt=0, le=1)]
    temperature: Annotated[float, Field(ge=0.1, le=2)] | None = None
    drop_strict: bool = False

    @model_validator(mode="after")
    def _changes_something(self) -> "Explore":
        if self.temperature is None and not self.drop_strict:
            raise ValueError("neither temperature nor drop_strict is set, so it changes nothing")
        return self

    def __str__(self) -> str:
        """Return the keys that are set, as TOML."""
        fields = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{key} = {msgspec.json.encode(fields[key]).decode()}" for key in fields)


class PolicySpec(BaseModel):
    """A policy, as one table of the file defines it.

    It answers its tenant's calls for a model named like the policy or listed in `models`, and the
    calls that its `agents` make for `base`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    base: Name
    agents: tuple[Name, ...] = ()
    models: tuple[Name, ...] = ()
    trained: StrictBool = True
    recipe: Name | None = None
    explore: Explore | None = None
    publish_with: tuple[Name, ...] = ()
    tenant: Annotated[str, Field(pattern=rf"^{PATTERN}$")] = DEFAULT

    @model_validator(mode="after")
    def _has_only_keys_of_its_kind(self) -> "PolicySpec":
        for key in ("recipe", "explore", "publish_with"):
            if getattr(self, key) and not self.trained:
                raise ValueError(f"{key} is for a trained policy alone; leave it out")
        return self


class PolicyTable:
    """Decide which of one file's policies answers a call (pure)."""

    def __init__(self, specs: Iterable[PolicySpec]) -> None:
        """Store the policies; no two answer the same call (`parse_policies`)."""
        self._specs = {spec.name: spec for spec in specs}
        self._by_model = {
            (spec.tenant, model): spec for spec in self.specs for model in (*spec.models, spec.name)
        }
        self._by_agent = {
            (spec.tenant, spec.base, agent): spec for spec in self.specs for agent in spec.agents
        }
        self._sets = _companion_sets(self.specs)

    @property
    def specs(self) -> tuple[PolicySpec, ...]:
        """Return all policies, in the order of the file."""
        return tuple(self._specs.values())

    def policy_named(self, name: str) -> PolicySpec | None:
        return self._specs.get(name)

    def answering(self, model: str, agent: str, tenant: str = DEFAULT) -> PolicySpec | None:
        """Return the policy that answers an agent's call for `model`, or None if none does.

        Only policies of `tenant` answer. A policy with this base and agent comes before a policy
        with this model.
        """
        return self._by_agent.get((tenant, model, agent)) or self._by_model.get((tenant, model))

    def live_together(self, name: str) -> tuple[str, ...]:
        """Return the names of the policies whose versions go live together, with `name` among them.

        `publish_with` is symmetric and transitive.
        """
        return self._sets.get(name, (name,))


def _companion_sets(specs: Iterable[PolicySpec]) -> dict[str, tuple[str, ...]]:
    """Map each policy's name to the sorted names that go live together, its own included."""
    sets: dict[str, set[str]] = {}
    for spec in specs:
        merged = {spec.name}.union(
            *(sets.get(name, {name}) for name in (spec.name, *spec.publish_with))
        )
        sets |= dict.fromkeys(merged, merged)
    return {name: tuple(sorted(merged)) for name, merged in sets.items()}


FILE: Final = TableFile(
    PolicySpec,
    TABLE,
    thing="policy",
    remedies=REMEDIES,
    error=BadPolicies,
    setting="PAWL_POLICIES",
    unset="to make each model a policy",
)


def open_policies(path: Path | None) -> PolicyTable | None:
    """Return the policies in the file that the settings name, or None if they name none.

    Raises:
        BadPolicies: the file cannot be read or is invalid.
    """
    return None if path is None else parse_policies(FILE.text_of(path), str(path))


def parse_policies(text: str, where: str) -> PolicyTable:
    """Return the policies in `text`; `where` names the file in messages.

    Raises:
        BadPolicies: the text is not TOML, or a value in it is invalid.
    """
    specs = FILE.tables(text, where)
    problem = _conflict(specs)
    if problem is not None:
        raise BadPolicies(f"{where}: {problem}")
    return PolicyTable(specs)


def _conflict(specs: Sequence[PolicySpec]) -> str | None:
    """Return an error message if two tables contradict each other, else None."""
    answered: dict[tuple[str, str, str], str] = {}
    for spec in specs:
        by_agent = [("agents", f"{agent!r} with base {spec.base!r}") for agent in spec.agents]
        for key, calls in [*by_agent, *(("models", repr(model)) for model in spec.models)]:
            entry = spec.tenant, key, calls
            if entry in answered:
                both = " and ".join(sorted({repr(answered[entry]), repr(spec.name)}))
                return f"{key}: {calls} is claimed twice, by {both}; leave it in one place"
            answered[entry] = spec.name
    for spec in specs:
        owner = answered.get((spec.tenant, "models", repr(spec.name)))
        if owner is not None and owner != spec.name:
            return f"models: {spec.name!r} of policy {owner!r} is another policy's name; rename one"
    return _companion_error(specs)


def _companion_error(specs: Sequence[PolicySpec]) -> str | None:
    """Return an error message if a `publish_with` names no other trained policy of its tenant.

    Return None if all are valid.
    """
    for spec in specs:
        possible = [
            other.name
            for other in specs
            if other.trained and other.tenant == spec.tenant and other.name != spec.name
        ]
        for partner in spec.publish_with:
            if partner not in possible:
                of_tenant = "" if spec.tenant == DEFAULT else f" of tenant {spec.tenant!r}"
                return (
                    f"policy {spec.name!r}: publish_with: {partner!r} is no other policy{of_tenant}"
                    f" with trained = true; name some of these: {', '.join(possible) or 'none'}"
                )
    return None
