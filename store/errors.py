"""Define the store's errors under `StoreError`; the driver's error is kept as the cause."""

from collections.abc import Mapping
from uuid import UUID


class StoreError(Exception):
    """Report that the store could not complete an operation."""


class NotListening(StoreError):
    """Report that a port cannot be listened on; the message names its setting and the remedy."""


class NewerSchema(StoreError):
    """Report that a newer version of Pawl has migrated the schema, and this one cannot use it.

    Waiting does not help: a person has to install that version, or downgrade the schema.
    """


class RecordRefused(StoreError):
    """Report that the database refuses a record; the rest of the batch may be stored."""


class Damaged(StoreError):
    """Report that a call cannot be read back as it was written.

    `episodes` maps the id of each episode that cannot be read to the reason.
    """

    def __init__(self, message: str, episodes: Mapping[UUID, str] | None = None) -> None:
        super().__init__(message)
        self.episodes = dict(episodes or {})


class ClaimLost(StoreError):
    """Report that an update has no claim: it has ended, or another update of its policy runs."""


class ClaimSpoilt(StoreError):
    """Report that an update cannot be recorded because of an event since its claim.

    The update is still running: release it, and claim again.
    """


class BadPolicies(StoreError):
    """Report that the file that `PAWL_POLICIES` names cannot be used."""


class UnknownPolicy(StoreError):
    """Report that no policy has that name, or that it has no version that fits the request."""


class StateChanged(StoreError):
    """Report that a version's state has changed since a decision, or does not allow the change."""


class RolledBack(StoreError):
    """Report that a version can never take a state: it was rolled back, or retraining ended it."""


class WrongVersionState(StoreError):
    """Report that a version cannot be promoted, rolled back or retrained from, and why."""


class UnknownUpdate(StoreError):
    """Report that a version or id names no update, several updates, or one that cannot be read."""


class UnknownNames(StoreError):
    """Report names of episodes or API keys that the ledger does not have; nothing was changed."""


class BadKey(StoreError):
    """Report that a requested API key cannot be made; the message says why."""


class UnknownKey(StoreError):
    """Report that no unrevoked API key has that name, id or secret."""
