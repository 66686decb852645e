"""Determine the tenant of a policy, and hide the versions of other tenants (pure).

A policy belongs to one tenant, and does not exist for the others. A policy that has begun belongs
to the tenant that it began with; if the policies file names another, no tenant owns it. A policy
unknown to both belongs to the default tenant. Only its owner may request a version at the upstream:
otherwise anybody who knows the name could use it.
"""

from collections.abc import Iterable, Mapping

from proxy.errors import NotServed
from proxy.upstreams.upstreams import shortened
from store.policy_table import PolicyTable
from store.tenants import DEFAULT
from store.versions import PolicyVersion


class Owners:
    """The tenant of each policy, by the policies file and by the database."""

    def __init__(self, table: PolicyTable | None) -> None:
        """Begin with the file's policies (None: there is no file), and none of the database."""
        specs = () if table is None else table.specs
        self._said = {spec.name: spec.tenant for spec in specs}
        self._bases = frozenset(spec.base for spec in specs)
        self._of_keys = frozenset[str]()
        self.learn(())

    def learn(self, versions: Iterable[PolicyVersion]) -> None:
        """Replace the policies known from the database."""
        self._began: Mapping[str, str] = {one.name: one.tenant for one in versions}
        self._of_policies = {*self._said.values(), *self._began.values()} - {DEFAULT}
        self._learn_others()
        # The default tenant if it owns all policies: nothing is hidden from it. Else None.
        self.sole = None if self._of_policies else DEFAULT

    def learn_keys(self, tenants: Iterable[str]) -> None:
        """Replace the tenants that ever had a key."""
        self._of_keys = frozenset(tenants) - {DEFAULT}
        self._learn_others()

    def _learn_others(self) -> None:
        # All known tenants but the default; an attribute, as each call reads it.
        self.other_tenants = self._of_keys | self._of_policies

    def owns(self, tenant: str, policy: str) -> bool:
        declared, began = self._said.get(policy), self._began.get(policy)
        if declared is not None and began is not None and declared != began:
            return False
        return (declared or began or DEFAULT) == tenant

    def hides(self, tenant: str, model: str | None) -> bool:
        """Return whether `model` has the form of a version's name, and no policy of the tenant's.

        Other tenants' versions look like unknown versions: neither is requested at the upstream.
        Nothing is hidden from `sole`, nor is a base model with such a name.
        """
        if model is None or tenant == self.sole or model in self._bases:
            return False
        policy = _policy_in(model)
        is_known = policy in self._said or policy in self._began
        return policy is not None and not (is_known and self.owns(tenant, policy))

    def check(self, tenant: str, model: str | None, param: str = "model") -> None:
        """Check that a tenant may request the model that the field `param` names.

        Raises:
            NotServed: the model is hidden from the tenant.
        """
        if self.hides(tenant, model):
            raise NotServed(
                f"There is no version {shortened(model or '')!r}: ask for a policy, or for a "
                "version of one",
                param=param,
                code="model_not_found",
            )


def _policy_in(model: str) -> str | None:
    """Return the policy in a version's name, or in text that a server may take for one, else None.

    Without a policies file a policy's name may contain an @.
    """
    policy, _, number = model.strip().rpartition("@")
    return policy if policy and number.isdecimal() else None
