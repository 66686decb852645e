"""What can go wrong in the store. One root; the driver's error is always kept as the cause."""

from collections.abc import Mapping
from uuid import UUID


class StoreError(Exception):
    """The store could not do what it was asked to."""


class Refused(StoreError):
    """The database refuses a record of a batch; the batch's other records may be stored."""


class Damaged(StoreError):
    """A call cannot be read back as it was written.

    `episodes`: why, by the id of each episode that cannot be read for it.
    """

    def __init__(self, message: str, episodes: Mapping[UUID, str] | None = None) -> None:
        super().__init__(message)
        self.episodes = dict(episodes or {})


class ClaimLost(StoreError):
    """An update tried to consume episodes that it no longer holds."""


class UnknownPolicy(StoreError):
    """No policy, or no version of it, goes by that name."""


class UnknownUpdate(StoreError):
    """No update, or more than one, goes by that version or id; or it is not over."""
