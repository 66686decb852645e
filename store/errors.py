"""Define the store's errors under `StoreError`; the driver's error is kept as the cause."""

from collections.abc import Mapping
from uuid import UUID


class StoreError(Exception):
    """Report that the store could not complete an operation."""


class NotListening(StoreError):
    """Report that a port cannot be listened on; the message names its setting and the remedy."""


class NewerSchema(StoreError):
    """Report that a newer version of Pawl has migrated the database, which does not serve this one.

    Waiting does not help: somebody has to install that version, or to downgrade the schema.
    """


class Refused(StoreError):
    """Report that the database refuses a record; its batch may be stored without it."""


class Damaged(StoreError):
    """Report that a call cannot be read back as it was written.

    `episodes` maps the id of each episode that cannot be read to the reason.
    """

    def __init__(self, message: str, episodes: Mapping[UUID, str] | None = None) -> None:
        """Store the message, and the reasons by episode if they are known."""
        super().__init__(message)
        self.episodes = dict(episodes or {})


class ClaimLost(StoreError):
    """Report that an update does not hold its episodes: it ended, or another of its policy runs."""


class ClaimSpoilt(StoreError):
    """Report that an update cannot be recorded, for what happened since its claim.

    It still runs: release it, and claim again.
    """


class BadPolicies(StoreError):
    """Report that the file that `PAWL_POLICIES` names cannot be used."""


class UnknownPolicy(StoreError):
    """Report that no policy has that name, or that the policy has no such version."""


class StateChanged(StoreError):
    """Report that a version has another state by now than the one that a decision rested on."""


class RolledBack(StoreError):
    """Report that what was rolled back can neither serve nor be trained on any more."""


class NotGated(StoreError):
    """Report that a version has no traffic that a roll-back could take from it."""


class UnknownUpdate(StoreError):
    """Report that no finished update, or more than one, has that version or id."""


class UnknownNames(StoreError):
    """Report names of episodes or keys that the ledger does not have; nothing was changed."""


class BadKey(StoreError):
    """Report that an API key cannot be made as it was asked for; the message says why."""


class UnknownKey(StoreError):
    """Report that no API key that is not revoked has that name or id."""
