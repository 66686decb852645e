"""Separate tenants by a namespace for each (pure).

Names from clients and model servers (of episodes, tasks, calls, responses, idempotency keys) are
stored as TENANT, U+001F, NAME; fingerprints are computed with the tenant as the key. Code that
looks a name up therefore finds names of the same tenant alone, without knowing of tenants
(docs/decisions/068-tenants.md). Names of the tenant `default` are stored unchanged.
"""

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

# The tenant of requests without a key, or with a key without a tenant.
DEFAULT: Final = "default"
# No tenant's name holds it, and no name that a client gives an episode: those are printable.
SEPARATOR: Final = "\x1f"
# At most 64 characters, the longest key of BLAKE2b.
PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def scoped(tenant: str, name: str) -> str:
    """Return a tenant's name as it is stored.

    A name of the default tenant that could be taken for another's gets a separator before it.
    """
    if tenant == DEFAULT:
        return name if SEPARATOR not in name else SEPARATOR + name
    return f"{tenant}{SEPARATOR}{name}"


def tenant_of(kept: str) -> str:
    """Return the tenant of a stored name."""
    if SEPARATOR not in kept:
        return DEFAULT
    return kept.partition(SEPARATOR)[0] or DEFAULT


def bare(kept: str) -> str:
    """Return a stored name as the client gave it."""
    return kept.partition(SEPARATOR)[2] if SEPARATOR in kept else kept


def name_in_same_tenant(kept: str, name: str) -> str:
    """Return `name` as stored for the tenant of the stored name `kept`."""
    return scoped(tenant_of(kept), name)


def stored_prefix(tenant: str) -> str | None:
    """Return the prefix of a tenant's stored names; None for the default tenant, which has none."""
    return None if tenant == DEFAULT else tenant + SEPARATOR


def digest_key(tenant: str) -> bytes:
    """Return the key of a tenant's digests, which is empty for the default tenant."""
    return b"" if tenant == DEFAULT else tenant.encode()


def keyed_digests(tenant: str, digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return fingerprints (16 bytes) keyed with the tenant; the first byte, the kind, stays."""
    if tenant == DEFAULT:
        return tuple(digests)
    key = digest_key(tenant)
    return tuple(one[:1] + blake2b(one, digest_size=15, key=key).digest() for one in digests)


_FAMILY: Final = re.compile(r"[^/:]*")
_NUMBER: Final = re.compile(r"[\W_]*\d+$")


def task_family(task: str | None) -> str:
    """Return the name of a task's family, whose episodes are compared with each other.

    It is the part before the first `/` or `:`, or, where there is neither, the name without
    the number at its end: `refunds/17`, `refunds:x` and `refunds-17` are all `refunds`.
    Episodes without a task form one family (the empty name), and so do those whose task is
    derived from the prompt (`prompt:…`). Task and family are stored names, so that each tenant has
    its own families.
    """
    name = bare(task or "")
    match = _FAMILY.match(name)
    assert match is not None
    family = match[0] if match[0] != name else _NUMBER.sub("", name)
    return scoped(tenant_of(task or ""), family)
