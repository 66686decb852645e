"""Choose which layers of a model get an adapter, by its architecture (pure).

Attention and dense layers do, the shared experts of a mixture among them: every token passes
through these. Routers never do: where a changed router sends a token is a jump that no gradient
sees, and the least difference in arithmetic between server and trainer makes it another jump.
Nor do experts: each sees few of an update's tokens, and few servers adapt them.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from store.records import Record

# Names that hold in all architectures of transformers, and in models' own code.
EXPERTS: Final = "experts"
ROUTER_NAMES: Final = re.compile(r"(.*_)?(gate|router)")
ROUTER_KINDS: Final = re.compile(r".*(Router|Gating)")
# Model servers multiply it into attention's other matrices as they load the model, where they see
# no adapter of it.
FOLDED: Final = frozenset({"kv_b_proj"})


class ModelModule(Record, frozen=True, kw_only=True):
    """Describe a module of a model.

    Attributes:
        name: its path in the model.
        kind: the name of its class.
        linear: whether it is a linear layer, which LoRA can adapt.
        head: whether it is the LM head.
    """

    name: str
    kind: str
    linear: bool = False
    head: bool = False


def choose(parts: Sequence[ModelModule]) -> list[str] | None:
    """Return the paths of the layers that get an adapter if the recipe names none.

    None is every linear layer but the LM head.
    """
    holders = _expert_holders(parts)
    routers = _routers(parts, holders)
    linear = [part.name for part in parts if part.linear and not part.head]
    layers = [
        name
        for name in linear
        if not _is_inside(name, holders)
        and not _is_inside(name, routers)
        and _leaf(name) not in FOLDED
    ]
    return None if not holders and layers == linear else layers


def _expert_holders(parts: Sequence[ModelModule]) -> frozenset[str]:
    """Return the paths of the modules that hold experts among which tokens are divided."""
    return frozenset(
        part.name
        for part in parts
        if _leaf(part.name) == EXPERTS
        or (part.kind.endswith("Experts") and "Shared" not in part.kind)
    )


def _routers(parts: Sequence[ModelModule], holders: Collection[str]) -> frozenset[str]:
    """Return the paths of routers: of such a class, or gates that stand beside experts."""
    blocks = {_parent(holder) for holder in holders}
    return frozenset(
        part.name
        for part in parts
        if ROUTER_KINDS.fullmatch(part.kind)
        or (_parent(part.name) in blocks and ROUTER_NAMES.fullmatch(_leaf(part.name)))
    )


def _is_inside(name: str, roots: Collection[str]) -> bool:
    return any(path in roots for path in _paths(name))


def _paths(name: str) -> Iterator[str]:
    """Yield a module's path and those of the modules that it is in."""
    while name:
        yield name
        name = _parent(name)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
