"""Tell which adapters a model server lacks of those that the store lists as servable (pure)."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from store.versions import SERVABLE, PolicyVersion

# What a server lists: `root` and `parent` of each model, by its name.
Listed = Mapping[str, Mapping[str, Any]]


def is_servable(version: PolicyVersion) -> bool:
    """Return whether the version has an adapter that every replica must have loaded."""
    return version.version > 0 and version.state in SERVABLE


def belonging(versions: Collection[PolicyVersion], listed: Listed) -> list[PolicyVersion]:
    """Return the servable versions of the policies whose base model the server has.

    Those with the traffic come first, then the newest: what most requests ask for.
    """
    bases = {name for name, model in listed.items() if model.get("parent") is None}
    here = {one.name for one in versions if one.version == 0 and one.served_name in bases}
    servable = [one for one in versions if is_servable(one) and one.name in here]
    return sorted(servable, key=lambda one: (one.state != "serving", -one.version, one.name))


def lacking(versions: Iterable[PolicyVersion], listed: Listed) -> list[PolicyVersion]:
    """Return those of `versions` that the server does not have under their name."""
    return [one for one in versions if one.served_name not in listed]


def with_other_files(versions: Iterable[PolicyVersion], listed: Listed) -> list[PolicyVersion]:
    """Return those of `versions` under whose name the server has files that are not theirs."""
    return [
        one
        for one in versions
        if one.served_name in listed and listed[one.served_name].get("root") != one.adapter_path
    ]
