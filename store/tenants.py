"""Put each tenant's names into a namespace of its own (pure).

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
# No tenant's name contains it, nor does a client's name for an episode: those are printable.
SEPARATOR: Final = "\x1f"
# At most 64 characters, the longest key of BLAKE2b.
PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def scoped(tenant: str, name: str) -> str:
    """Return `name`, which a client of `tenant` gave, as it is stored.

    A name in the default tenant that contains a separator gets another one before it: otherwise it
    would look like another tenant's.
    """
    if tenant == DEFAULT:
        return name if SEPARATOR not in name else SEPARATOR + name
    return f"{tenant}{SEPARATOR}{name}"


def tenant_of(stored: str) -> str:
    """Return the tenant of a stored name."""
    if SEPARATOR not in stored:
        return DEFAULT
    return stored.partition(SEPARATOR)[0] or DEFAULT


def bare(stored: str) -> str:
    """Return a stored name without its tenant, as the client gave it."""
    return stored.partition(SEPARATOR)[2] if SEPARATOR in stored else stored


def name_in_same_tenant(stored: str, name: str) -> str:
    """Return `name` as it is stored for the tenant that the stored name `stored` belongs to."""
    return scoped(tenant_of(stored), name)


def stored_prefix(tenant: str) -> str | None:
    """Return the prefix of a tenant's stored names; None for the default tenant, which has none."""
    return None if tenant == DEFAULT else tenant + SEPARATOR


def digest_key(tenant: str) -> bytes:
    """Return the hash key of a tenant's digests, which is empty for the default tenant."""
    return b"" if tenant == DEFAULT else tenant.encode()


def keyed_digests(tenant: str, digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return these fingerprints (16 bytes) hashed with the tenant as key, but for the first byte.

    The first byte is the kind. Fingerprints of the default tenant are returned unchanged.
    """
    if tenant == DEFAULT:
        return tuple(digests)
    key = digest_key(tenant)
    return tuple(one[:1] + blake2b(one, digest_size=15, key=key).digest() for one in digests)


_FAMILY: Final = re.compile(r"[^/:]*")
_NUMBER: Final = re.compile(r"[\W_]*\d+$")


def task_family(task: str | None) -> str:
    """Return the name of a task's family, whose episodes share a moving baseline.

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
