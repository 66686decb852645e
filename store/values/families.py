"""Tell which tasks are of one family, by their names (pure)."""

import re
from typing import Final

from store.tenants import bare, scoped, tenant_of

_FAMILY: Final = re.compile(r"[^/:]*")
_NUMBER: Final = re.compile(r"[\W_]*\d+$")


def task_family(task: str | None) -> str:
    """Return the name of a task's family, whose episodes are compared with each other.

    It is the part before the first `/` or `:`, or, where there is neither, the name without
    the number at its end: `refunds/17`, `refunds:x` and `refunds-17` are all `refunds`.
    Episodes without a task form one family (the empty name), and so do those whose task is
    derived from the prompt (`prompt:…`). Each tenant's are its own: task and family are names as
    they are kept.
    """
    name = bare(task or "")
    match = _FAMILY.match(name)
    assert match is not None
    family = match[0] if match[0] != name else _NUMBER.sub("", name)
    return scoped(tenant_of(task or ""), family)
