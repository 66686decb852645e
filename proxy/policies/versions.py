"""Choose the version of a policy that serves an episode (pure).

The requested model name determines the policy; with a policies file, model name and agent do
(`store.policy_table`). An episode's first call of a policy gets the current version of its arm,
which is the serving version for most. Later calls keep that version while it can be served: one
version of each policy samples an episode. If it was unloaded, the episode moves to the serving
version, and keeps that. The workers of a proxy agree on each episode's version
(`proxy.policies.shared_pins`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Final

import msgspec

from proxy.exploring import Exploring
from proxy.identity.identify import DEFAULT_AGENT
from proxy.policies.owners import Owners
from proxy.policies.shared_pins import SharedPins
from store.policy_table import Explore, PolicySpec, PolicyTable
from store.records import EVAL, TRAIN, Arm, Split
from store.tenants import DEFAULT
from store.versions import PolicyState, PolicyVersion

_BYTES: Final = 6
_HASH_RANGE: Final = 2 ** (8 * _BYTES)
_SEPARATOR: Final = "\x1f"


class Arms(msgspec.Struct, frozen=True):
    """The versions of a policy's arms, and their shares as fractions of all new episodes.

    The serving version is compared with `control`, and `canary` is tried, if there are any.
    """

    policy: str
    serving: int
    canary: int | None = None
    canary_share: float = 0.0
    control: int | None = None
    control_share: float = 0.0

    @property
    def are_several(self) -> bool:
        """Return whether the policy has another arm than `serving`: a canary or a control."""
        return self.canary is not None or self.control is not None

    def arm_of_new_episode(self, episode: str) -> Arm:
        """Return the arm of a new episode, which a hash of its stored name decides."""
        if not self.are_several:
            return "serving"
        drawn = episode_fraction(
            self.policy, self.serving if self.canary is None else self.canary, episode
        )
        if drawn < self.control_share:
            return "control"
        return "canary" if drawn < self.control_share + self.canary_share else "serving"

    def version_of(self, arm: Arm) -> int:
        """Return the version that an arm's new episodes get."""
        version = {"canary": self.canary, "control": self.control}.get(arm)
        return self.serving if version is None else version

    def arm_of_version(self, version: int) -> Arm:
        """Return the arm of an episode that already has `version`.

        An earlier serving version counts as the arm `serving`, unless it is the control now.
        """
        if version == self.canary:
            return "canary"
        return "control" if version == self.control else "serving"


def episode_fraction(policy: str, version: int, episode: str) -> float:
    """Return a hash of policy, version and episode, evenly spread over [0, 1)."""
    hashed = _SEPARATOR.join((policy, str(version), episode)).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(hashed, digest_size=_BYTES).digest()) / _HASH_RANGE


def arms_of(versions: Iterable[PolicyVersion]) -> Mapping[str, Arms]:
    """Return the arms of each policy with a serving version, by policy name."""
    by_state: dict[str, dict[PolicyState, PolicyVersion]] = {}
    for one in versions:
        # The retired version with a share is the control.
        if one.state == "serving" or (one.share and one.is_servable):
            by_state.setdefault(one.name, {})[one.state] = one
    arms: dict[str, Arms] = {}
    for name, own in by_state.items():
        canary, control = own.get("canary"), own.get("retired")
        if "serving" in own:
            arms[name] = Arms(
                policy=name,
                serving=own["serving"].version,
                canary=None if canary is None else canary.version,
                canary_share=0.0 if canary is None else canary.share or 0.0,
                control=None if control is None else control.version,
                control_share=0.0 if control is None else control.share or 0.0,
            )
    return arms


WHY_NOT_YET: Final = "is being loaded again"
WHY_NOT: Final[Mapping[PolicyState, str]] = {
    "written": "is not loaded yet",
    "rejected": "was rejected: it did not load, was not served as it was trained, scored below "
    "the serving version, or was trained from a version that was rolled back",
}
WHY_UNLOADED: Final = (
    "is {state}, and was unloaded to free its slot; while its files exist it can be loaded again "
    "(docs/howto/evaluate.md)"
)
WHY_DELETED: Final = (
    "was unloaded or rejected, and its files were deleted, as no call asked for it any more"
)


MAX_PINS: Final = 200_000
# States in which a version cannot be requested by name. An unloaded version can be requested: a
# server may still have it.
NEVER_LOADED: Final[tuple[PolicyState, ...]] = ("written", "rejected")
# How many versions a message names.
MOST_NAMED: Final = 8
MOST_DIGITS: Final = 9
# Marks a policy's name in the shared table where a version is only promised. A promise is no pin:
# the version that another proxy stored for the episode counts more.
_PROMISED: Final = "\x1epromised"


class ServedVersion(msgspec.Struct, frozen=True):
    """The policy and version that a call gets, and the model name to request at the upstream.

    A policy that is not trained has no version: the base model serves it. `exploring` is set for
    an episode that explores. A call that names its version, or is evaluation, has no `arm`.
    """

    policy: str | None
    version: int | None
    served_name: str | None
    exploring: Exploring | None = None
    arm: Arm | None = None


def _why_not(version: PolicyVersion) -> str:
    """Return why the upstream may lack a known version, as the end of a sentence."""
    if version.unloaded:
        return WHY_UNLOADED.format(state=version.state.replace("_", " "))
    if version.state == "rolled_back":
        kept = "was rolled back, and is kept for the episodes that began with it alone"
        return f"{kept}; it {WHY_NOT_YET}"
    return WHY_NOT.get(version.state, WHY_NOT_YET)


class Versions:
    """The serving versions of all policies, and the versions that episodes keep.

    This class has no clock, and its only I/O is on the workers' shared memory and in `catch_up`:
    the worker calls `replace` with new versions.
    """

    def __init__(
        self,
        versions: Iterable[PolicyVersion] = (),
        table: PolicyTable | None = None,
        shared: SharedPins | None = None,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the database's `versions` and no episode pinned.

        `table` lists the policies; without it the requested model name is the policy's name.
        `shared` has the versions that the workers agreed on; None: there is only one worker.
        `catch_up` is called if another worker chose a version that is not served here; it has to
        call `replace` with the newest versions.
        """
        self._table = table
        self._shared = shared
        self._catch_up = catch_up
        self.owners = Owners(table)
        self._pins: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._promised: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.replace(versions)

    def replace(self, versions: Iterable[PolicyVersion]) -> None:
        """Replace all versions by `versions`, those whose files exist now; pins are kept."""
        self._served_names: dict[str, dict[int, str]] = {}
        self._serving: dict[str, int] = {}
        self._by_requested_name: dict[str, ServedVersion] = {}
        self._known: dict[str, dict[int, PolicyVersion]] = {}
        self._newest: dict[str, int] = {}
        versions = list(versions)
        self.owners.learn_policies(versions)
        # A policy with one arm needs no draw: all its episodes get the serving version.
        arms = arms_of(versions).items()
        self._arms = {policy: one for policy, one in arms if one.are_several}
        for version in versions:
            name, number = version.name, version.version
            self._newest[name] = max(number, self._newest.get(name, 0))
            self._known.setdefault(name, {})[number] = version
            # No episode can keep a version that is only loaded yet.
            if version.is_servable and version.state != "loaded":
                self._served_names.setdefault(name, {})[number] = version.served_name
            if version.state not in NEVER_LOADED:
                serving = ServedVersion(name, number, version.served_name)
                # Several policies may share a base model, whose name then belongs to none of them.
                if number or version.served_name == name:
                    self._by_requested_name[version.served_name] = serving
                # The base's served name may be the policy's; `NAME@0` is always version 0.
                self._by_requested_name[f"{name}@{number}"] = serving
            if version.state == "serving":
                self._serving[version.name] = version.version

    @property
    def serving(self) -> dict[str, int]:
        """Return the serving version of each policy, by policy name."""
        return dict(self._serving)

    def trained_policy(self, model: str, agent: str, tenant: str = DEFAULT) -> str | None:
        """Return the trained policy that answers an agent's call for `model`, or None."""
        if self._table is None:
            return model if model in self._serving and self._owns(tenant, model) else None
        spec = self._file_policy(model, agent, tenant)
        return spec.name if spec is not None and spec.trained else None

    def _file_policy(self, model: str, agent: str, tenant: str) -> PolicySpec | None:
        """Return the policies file's policy for a call, or None if the tenant owns none."""
        spec = None if self._table is None else self._table.answering(model, agent, tenant)
        return spec if spec is not None and self._owns(tenant, spec.name) else None

    def base_models(self, tenant: str) -> dict[str, str]:
        """Return the base model behind each model name of the tenant's policies in the file."""
        return {
            name: spec.base
            for spec in (() if self._table is None else self._table.specs)
            if spec.tenant == tenant and self._owns(tenant, spec.name)
            for name in (spec.name, *spec.models)
        }

    @property
    def is_exploring(self) -> bool:
        """Return whether any policy explores."""
        return self._table is not None and any(spec.explore for spec in self._table.specs)

    def exploration(self, model: str, agent: str, tenant: str = DEFAULT) -> Explore | None:
        """Return the exploration rule of the policy that answers a call for `model`, or None.

        A call that names a version is not explored.
        """
        spec = self._file_policy(model, agent, tenant)
        return None if spec is None else spec.explore

    def base_of(self, policy: str) -> str:
        """Return the name of a policy's base model, by which its upstream is found."""
        spec = None if self._table is None else self._table.policy_named(policy)
        return spec.base if spec is not None else self._served_names.get(policy, {}).get(0, policy)

    def knows_version_of(self, policy: str, episode: str) -> bool:
        """Return whether `resolve` can answer for an episode without a look-up in the database.

        A version that another worker of this proxy chose is pinned. Otherwise the episode may have
        begun at another proxy, or moved to another version there: only the database knows.
        """
        return (
            policy not in self._serving
            or len(self._served_names.get(policy, ())) < 2
            or self._pins.get((policy, episode)) in self._served_names[policy]
            or self._pin_version_of_others(policy, episode)
        )

    def _pin_version_of_others(self, policy: str, episode: str) -> bool:
        """Pin the version that another worker chose; return False if there is none to serve."""
        kept = None if self._shared is None else self._shared.pinned_version(policy, episode)
        if kept is None or not self._can_serve(policy, kept):
            return False
        self.pin(policy, episode, kept)
        return True

    def _can_serve(self, policy: str, version: int) -> bool:
        """Return whether `version` can be served; if it is unknown, read new versions first."""
        if version not in self._served_names.get(policy, ()):
            # Workers learn of a promotion within a tenth of a second of each other.
            self._catch_up()
        return version in self._served_names.get(policy, ())

    def _agree_on_version(self, policy: str, episode: str, proposed: int) -> int:
        """Return the version that an episode gets, which is the same at all workers."""
        if self._shared is None:
            return proposed
        can_serve = partial(self._can_serve, policy)
        return self._shared.agree_on_version(policy, episode, proposed, can_serve)

    def pin(self, policy: str, episode: str, version: int) -> None:
        """Remember `version` for `episode`, unless the remembered version can still be served."""
        key = (policy, episode)
        if self._pins.get(key) not in self._served_names.get(policy, ()):
            self._pins[key] = version
        if len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)

    def resolve(
        self,
        model: str | None,
        episode: str,
        agent: str = DEFAULT_AGENT,
        tenant: str = DEFAULT,
        split: Split = TRAIN,
        *,
        is_unnamed: bool = False,
    ) -> ServedVersion:
        """Return the policy, version and upstream's model name for an agent's call for `model`.

        `is_unnamed`: only this worker knows the episode, so its version is not shared. Evaluation
        measures the serving version: its episodes have no arm, and nothing is tried on them. A name
        that is not a policy's is unchanged; the name of a version (`NAME@3`) means that version,
        and `NAME@0` the base model. The caller has refused hidden names (`Owners.check`).
        """
        if model is None:
            return ServedVersion(None, None, None)
        policy = self.trained_policy(model, agent, tenant)
        if policy is not None:
            version = self._version_for(policy, episode, split, is_unnamed)
            served = self._served_names.get(policy, {}).get(version, self.base_of(policy))
            arms: Arms | None = self._arms.get(policy)
            arm: Arm | None = "serving" if arms is None else arms.arm_of_version(version)
            return ServedVersion(policy, version, served, arm=None if split == EVAL else arm)
        fixed = self._file_policy(model, agent, tenant)
        if fixed is not None:
            return ServedVersion(fixed.name, None, fixed.base)
        requested = self._by_requested_name.get(model) or self._deleted_version(model)
        if requested is not None and self._is_own_trained_policy(tenant, requested.policy):
            return requested
        return ServedVersion(None, None, model)

    def is_servable(self, serving: ServedVersion) -> bool:
        """Return whether the version is an adapter that every replica should have."""
        known = self._version(serving.policy or "", serving.version or 0)
        return known is not None and known.version > 0 and known.is_servable

    def _version(self, policy: str, number: int) -> PolicyVersion | None:
        return self._known.get(policy, {}).get(number)

    def why_not_served(self, model: str | None) -> str | None:
        """Return why the upstream lacks the version `model`; None if its policy is unknown."""
        named = self._version_in_name(model)
        if named is None:
            return None
        policy, number = named
        version = self._version(policy, number)
        if version is None:
            why = WHY_DELETED if self._is_deleted(policy, number) else "is unknown"
        else:
            why = _why_not(version)
        loaded = sorted(self._served_names.get(policy, ()), reverse=True)[:MOST_NAMED]
        names = ", ".join(f"{policy}@{one}" for one in loaded)
        return (
            f"The model server does not have {model}: this version {why}. "
            f"Ask for {policy}, or for a version that is loaded: {names}"
        )

    def _version_in_name(self, model: str | None) -> tuple[str, int] | None:
        """Return policy and number if `model` is `NAME@3`, and NAME a known policy; else None."""
        policy, _, number = (model or "").rpartition("@")
        if policy not in self._known or not number.isdecimal() or len(number) > MOST_DIGITS:
            return None
        return policy, int(number)

    def _deleted_version(self, model: str) -> ServedVersion | None:
        """Return the version that `model` names if its files were deleted, else None."""
        policy, number = self._version_in_name(model) or ("", 0)
        if not self._is_deleted(policy, number) or model != f"{policy}@{number}":
            return None
        return ServedVersion(policy, number, model)

    def _is_deleted(self, policy: str, number: int) -> bool:
        # A deleted version is not known, and its number is not above the newest known one.
        is_known = self._version(policy, number) is not None
        return not is_known and 0 < number <= self._newest.get(policy, 0)

    def _is_own_trained_policy(self, tenant: str, policy: str | None) -> bool:
        """Return whether a policy is trained, and the tenant owns it."""
        if policy is None or not self._owns(tenant, policy):
            return False
        spec = None if self._table is None else self._table.policy_named(policy)
        return self._table is None or (spec is not None and spec.trained)

    def _owns(self, tenant: str, policy: str) -> bool:
        """Return whether the tenant owns a policy; a sole tenant owns all."""
        return tenant == self.owners.sole or self.owners.owns(tenant, policy)

    def _version_for(self, policy: str, episode: str, split: Split, is_unnamed: bool) -> int:
        key = (policy, episode)
        if policy not in self._serving:
            # No trainer has begun the policy: its base model answers, and needs no pin.
            return 0
        pinned = self._pins.get(key)
        if pinned is not None and pinned in self._served_names[policy]:
            self._pins.move_to_end(key)
            return pinned
        # The pinned version, if any, can no longer be served.
        was_pinned = self._pins.pop(key, None) is not None
        promised = self._take_promised_version(policy, episode)
        if promised is None or not self._can_serve(policy, promised):
            # An episode that lost its version is not new: no canary is tried on it.
            is_new = not was_pinned and split != EVAL
            promised = self._draw_version(policy, episode) if is_new else self._serving[policy]
        agreed = promised if is_unnamed else self._agree_on_version(policy, episode, promised)
        self.pin(policy, episode, agreed)
        self._promise_versions(policy, episode, split)
        return agreed

    def _take_promised_version(self, policy: str, episode: str) -> int | None:
        """Return the version that `_promise_versions` promised an episode, or None; forget it."""
        promised = self._promised.pop((policy, episode), None)
        if promised is None and self._shared is not None and self._live_together_with(policy):
            return self._shared.pinned_version(policy + _PROMISED, episode)
        return promised

    def _live_together_with(self, policy: str) -> list[str]:
        """Return the other policies that go live together with this policy."""
        together = () if self._table is None else self._table.live_together(policy)
        return [other for other in together if other != policy]

    def _draw_version(self, policy: str, episode: str) -> int:
        """Return the version that a new episode of a policy gets: its name decides the arm."""
        arms: Arms | None = self._arms.get(policy)
        return (
            self._serving[policy]
            if arms is None
            else arms.version_of(arms.arm_of_new_episode(episode))
        )

    def _promise_versions(self, policy: str, episode: str, split: Split) -> None:
        """Choose the episode's versions of the policies that go live together with this one."""
        for other in self._live_together_with(policy):
            if other in self._serving:
                is_eval = split == EVAL
                chosen = self._serving[other] if is_eval else self._draw_version(other, episode)
                if self._shared is not None:
                    chosen = self._shared.agree_on_version(
                        other + _PROMISED, episode, chosen, lambda _: True
                    )
                self._promised.setdefault((other, episode), chosen)
        while len(self._promised) > MAX_PINS:
            self._promised.popitem(last=False)
