"""Make API keys, and hash them.

A key is `pawl_ID_SECRET`: an id by which it is found, and 256 random bits. Only its SHA-256 is
kept; why no slower hash is needed is in docs/decisions/066-keys.md.
"""

import secrets
from hashlib import sha256
from typing import Final

MARK: Final = b"pawl_"
ID_BYTES: Final = 8
SECRET_BYTES: Final = 32


def new_secret() -> tuple[str, str]:
    """Return a new key's id, and the key."""
    key_id = secrets.token_hex(ID_BYTES)
    return key_id, f"{MARK.decode()}{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def is_key(value: str) -> bool:
    """Return whether a credential looks like a key."""
    return value.startswith(MARK.decode())


def id_of(key: str) -> str:
    """Return the id in a key, which is no secret."""
    return key[len(MARK) : len(MARK) + 2 * ID_BYTES]


def hash_of(key: bytes) -> bytes:
    """Return the hash by which a key is kept, 32 bytes."""
    return sha256(key).digest()
