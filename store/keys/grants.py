"""Define what a key allows: its scopes, and the names that keys may have (pure)."""

import re
from typing import Final, Literal, get_args

from store.errors import BadKey
from store.records import Record
from store.tenants import DEFAULT, PATTERN

# Who may call while no key was ever made.
Access = Literal["loopback", "keys", "anyone"]

Scope = Literal["infer", "feedback", "read", "train", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
# No name looks like an id: `pawl keys revoke` takes either.
_NAME: Final = re.compile(r"(?![0-9a-f]{16}\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_TENANT: Final = re.compile(rf"{PATTERN}\Z")


class Limits(Record, frozen=True, kw_only=True):
    """Limit the requests of a key to each port of one proxy. None: no limit.

    `per_minute` is how many may begin in any 60 seconds, `at_once` how many may run. Once calls
    that ended in the last 60 seconds took `tokens_per_minute` tokens, no other may begin.
    """

    per_minute: int | None = None
    at_once: int | None = None
    tokens_per_minute: int | None = None


NO_LIMITS: Final = Limits()


class Grant(Limits, frozen=True, kw_only=True):
    """State what the bearer of a key may do; `hash` is the key's SHA-256.

    It is all that a worker knows of a key (`proxy.keys.key_file`).
    """

    id: str
    hash: bytes
    scopes: tuple[Scope, ...]
    tenant: str = DEFAULT


def check_name(name: str) -> str:
    """Return the name of a key.

    Raises:
        BadKey: it cannot be one.
    """
    if _NAME.match(name) is None:
        raise BadKey(
            f"{name!r:.80} cannot be the name of a key: use 1 to 64 letters, digits, dots, dashes "
            "and underscores, begin with a letter or digit, and do not make it look like a key's id"
        )
    return name


def check_tenant(tenant: str, scopes: tuple[Scope, ...]) -> str:
    """Return the name of the tenant that a key with these scopes belongs to.

    Raises:
        BadKey: it cannot be one, or a key of this tenant cannot be for one of the scopes.
    """
    if _TENANT.match(tenant) is None:
        raise BadKey(
            f"{tenant!r:.80} cannot be the name of a tenant: use 1 to 64 letters, digits, dots, "
            "dashes and underscores, and begin with a letter or digit"
        )
    if tenant != DEFAULT and "admin" in scopes:
        raise BadKey(
            f"a key of tenant {tenant} cannot be for admin, which manages what all tenants share: "
            f"leave the scope out, or make the key without --tenant"
        )
    return tenant


def read_scopes(text: str) -> tuple[Scope, ...]:
    """Return the scopes in a comma-separated list, each once, in the order of `SCOPES`.

    Raises:
        BadKey: there are none, or one is unknown.
    """
    named = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(named - set(SCOPES))
    if unknown or not named:
        what = f"{unknown[0]!r:.40} is no scope" if unknown else "a key needs a scope"
        raise BadKey(f"{what}; there are {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in named)
