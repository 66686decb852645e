"""Tell whose a policy is, and hide the versions of other tenants' (pure).

A policy is one tenant's, and to all others it is as if there were none of its name. A policy that
has begun is the tenant's that it began with, whatever its file says later; where the two disagree
it is nobody's. What neither knows is the default tenant's. A version may only be asked for at the
upstream by its owner: whoever knows the name could use it otherwise.
"""

from collections.abc import Iterable, Mapping

from proxy.errors import NotServed
from proxy.upstreams.upstreams import shown
from store.policy_table import PolicyTable
from store.tenants import DEFAULT
from store.versions import PolicyVersion


class Owners:
    """Know which tenant each policy belongs to, by the file of policies and by the store."""

    def __init__(self, table: PolicyTable | None) -> None:
        """Take the file's policies (None: there is no file), and none of the store's."""
        specs = () if table is None else table.specs
        self._said = {spec.name: spec.tenant for spec in specs}
        self._bases = frozenset(spec.base for spec in specs)
        self._of_keys = frozenset[str]()
        self.learn(())

    def learn(self, versions: Iterable[PolicyVersion]) -> None:
        """Replace what is known of the store's policies."""
        self._began: Mapping[str, str] = {one.name: one.tenant for one in versions}
        self._of_policies = {*self._said.values(), *self._began.values()} - {DEFAULT}
        self._learn_others()
        # The tenant whose all policies are, and to whom nothing is hidden; None: there are several.
        self.sole = None if self._of_policies else DEFAULT

    def learn_keys(self, tenants: Iterable[str]) -> None:
        """Replace the tenants that ever had a key."""
        self._of_keys = frozenset(tenants) - {DEFAULT}
        self._learn_others()

    def _learn_others(self) -> None:
        # All known tenants but the default one; an attribute, as each call looks at it.
        self.other_tenants = self._of_keys | self._of_policies

    def owns(self, tenant: str, policy: str) -> bool:
        """Return whether a policy is a tenant's."""
        declared, began = self._said.get(policy), self._began.get(policy)
        if declared is not None and began is not None and declared != began:
            return False
        return (declared or began or DEFAULT) == tenant

    def hides(self, tenant: str, model: str | None) -> bool:
        """Return whether `model` is formed as a version's name, and names none of the tenant's.

        Another tenant's version cannot be told from one that nobody has: neither is asked for at
        the upstream. Where there is one tenant only nothing is hidden, nor is a base model that has
        a name of this form.
        """
        if model is None or tenant == self.sole or model in self._bases:
            return False
        policy = _policy_in(model)
        is_known = policy in self._said or policy in self._began
        return policy is not None and not (is_known and self.owns(tenant, policy))

    def check(self, tenant: str, model: str | None, param: str = "model") -> None:
        """Check that a tenant may ask for a model of this name, which the field `param` has.

        Raises:
            NotServed: it is hidden from the tenant.
        """
        if self.hides(tenant, model):
            raise NotServed(
                f"There is no version {shown(model or '')!r}: ask for a policy, or for a version "
                "of one",
                param=param,
                code="model_not_found",
            )


def _policy_in(model: str) -> str | None:
    """Return the policy in a version's name, or in what a server could take for one, else None.

    The name of a policy without a file may hold an @ itself.
    """
    policy, _, number = model.strip().rpartition("@")
    return policy if policy and number.isdecimal() else None
