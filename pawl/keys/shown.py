"""Show the API keys: all but their secrets."""

from collections.abc import Sequence

import msgspec
from rich.table import Table

from pawl.output import cell
from store.keys.keys import ApiKey, NewKey


def as_json(new: NewKey) -> bytes:
    """Return a new key and its secret as one JSON line."""
    return msgspec.json.encode(msgspec.to_builtins(new.about) | {"key": new.key}) + b"\n"


def table(keys: Sequence[ApiKey]) -> Table:
    """Return the keys as a table for a terminal."""
    grid = Table(box=None, pad_edge=False)
    for name in ApiKey.__struct_fields__:
        grid.add_column(name, overflow="fold")
    for key in keys:
        row = msgspec.structs.asdict(key) | {"scopes": ",".join(key.scopes)}
        row |= {name: at and f"{at:%Y-%m-%d %H:%M} UTC" for name, at in _times(key).items()}
        grid.add_row(*[cell(value) for value in row.values()])
    return grid


def _times(key: ApiKey) -> dict[str, object]:
    return {"created_at": key.created_at, "revoked_at": key.revoked_at}
