"""What can go wrong in the store. One root; the driver's error is always kept as the cause."""


class StoreError(Exception):
    """The store could not do what it was asked to."""


class Refused(StoreError):
    """The database refuses a record of a batch; the batch's other records may be stored."""


class Damaged(StoreError):
    """A row cannot be read back as it was written."""


class ClaimLost(StoreError):
    """An update tried to consume episodes that it no longer holds."""


class UnknownPolicy(StoreError):
    """No policy, or no version of it, goes by that name."""


class UnknownUpdate(StoreError):
    """No update, or more than one, goes by that version or id; or it is not over."""
