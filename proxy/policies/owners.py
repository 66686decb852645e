"""Determine the tenant of a policy, and hide the versions of other tenants (pure).

A policy belongs to one tenant, and does not exist for the others. A policy in the database belongs
to the tenant that it began with; if the policies file names another, no tenant owns it. A policy
that neither file nor database knows belongs to the default tenant. Only the owner may request a
version at the upstream: otherwise anybody who knows the name could use it.
"""

from collections.abc import Iterable, Mapping

from proxy.errors import NotServed
from proxy.upstreams.upstreams import shortened
from store.policy_table import PolicyTable
from store.tenants import DEFAULT
from store.versions import PolicyVersion


class Owners:
    """The tenant of each policy, from the policies file and the database."""

    def __init__(self, table: PolicyTable | None) -> None:
        """Begin with the file's policies (None: there is no file), and none from the database."""
        specs = () if table is None else table.specs
        self._declared = {spec.name: spec.tenant for spec in specs}
        self._bases = frozenset(spec.base for spec in specs)
        self._tenants_of_keys = frozenset[str]()
        self.learn_policies(())

    def learn_policies(self, versions: Iterable[PolicyVersion]) -> None:
        """Replace the policies known from the database."""
        self._began: Mapping[str, str] = {one.name: one.tenant for one in versions}
        self._tenants_of_policies = {*self._declared.values(), *self._began.values()} - {DEFAULT}
        self._learn_others()
        # The default tenant if it owns all policies: nothing is hidden from it. Else None.
        self.sole = None if self._tenants_of_policies else DEFAULT

    def learn_tenants(self, tenants: Iterable[str]) -> None:
        """Replace the tenants that ever had a key."""
        self._tenants_of_keys = frozenset(tenants) - {DEFAULT}
        self._learn_others()

    def _learn_others(self) -> None:
        # All known tenants but the default; an attribute, as each call reads it.
        self.other_tenants = self._tenants_of_keys | self._tenants_of_policies

    def owns(self, tenant: str, policy: str) -> bool:
        declared, began = self._declared.get(policy), self._began.get(policy)
        if declared is not None and began is not None and declared != began:
            return False
        return (declared or began or DEFAULT) == tenant

    def hides(self, tenant: str, model: str | None) -> bool:
        """Return whether `model` is a version's name, `NAME@3`, and NAME no policy of the tenant.

        Other tenants' versions look like unknown versions: neither is requested at the upstream.
        Nothing is hidden from the tenant `sole`, which owns all policies, and no base model, even
        with a name of that form.
        """
        if model is None or tenant == self.sole or model in self._bases:
            return False
        policy = _policy_in(model)
        is_known = policy in self._declared or policy in self._began
        return policy is not None and not (is_known and self.owns(tenant, policy))

    def check(self, tenant: str, model: str | None, param: str = "model") -> None:
        """Check that a tenant may request `model`, which the request's field `param` names.

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
    """Return the policy in a version's name (`NAME@3`); None if `model` has another form.

    Spaces around are ignored, as a server may ignore them. Without a policies file, NAME may
    contain an @.
    """
    policy, _, number = model.strip().rpartition("@")
    return policy if policy and number.isdecimal() else None
