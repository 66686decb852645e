"""The store's errors. All derive from `StoreError`; the driver's error is kept as the cause."""

from collections.abc import Mapping
from uuid import UUID


class StoreError(Exception):
    """The store could not complete an operation."""


class Refused(StoreError):
    """The database refuses a record of a batch; the other records may be stored without it."""


class Damaged(StoreError):
    """A call cannot be read back as it was written.

    `episodes` maps the id of each episode that cannot be read to the reason.
    """

    def __init__(self, message: str, episodes: Mapping[UUID, str] | None = None) -> None:
        """Store the message, and the reasons by episode if they are known."""
        super().__init__(message)
        self.episodes = dict(episodes or {})


class ClaimLost(StoreError):
    """An update does not hold its episodes: it has ended, or another of its policy is running."""


class TurnedEvaluation(StoreError):
    """An episode that an update holds turned out to be evaluation: the update cannot be recorded.

    The update still runs. Once it is released, that episode is not claimed again.
    """


class BadPolicies(StoreError):
    """The file that `PAWL_POLICIES` names cannot be used."""


class UnknownPolicy(StoreError):
    """No policy has that name, or the policy has no such version."""


class UnknownUpdate(StoreError):
    """No finished update has that version or id, or more than one has."""


class BadPage(StoreError):
    """A page was asked for in a way that names none: its size, or the item that it begins after."""
