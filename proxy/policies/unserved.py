"""Say why a version that a request names is not served, by its state."""

from collections.abc import Mapping
from typing import Final

from store.versions import PolicyState

_AGAIN: Final = "is being loaded again"
WHY_NOT: Final[Mapping[PolicyState, str]] = {
    "written": "is not published yet",
    "ready": _AGAIN,
    "candidate": _AGAIN,
    "canary": _AGAIN,
    "published": _AGAIN,
    "serving": _AGAIN,
    "rolled_back": "was rolled back, and is kept for the episodes that began with it alone; for "
    f"these it {_AGAIN}",
    "retired": "is retired, and was unloaded because no episode used it; while its files "
    "are there they can be loaded again (docs/howto/evaluate.md)",
    "rejected": "was rejected: it did not load, was not served as it was trained, or was trained "
    "on from a version that was rolled back",
}
DELETED: Final = (
    "was retired or rejected, and its files were deleted, as nothing asked for them any more"
)
