"""Build prefix trees, so that rows that share a beginning compute it once (pure).

Rows are inserted in lexicographic order, so nodes are in depth-first pre-order and "kv is q
or an ancestor of q" is an interval test: kv ≤ q < end[kv].
"""

from collections.abc import Sequence

from store.records import Record


class Tree(Record, frozen=True, kw_only=True):
    """Hold a packed prefix tree of N nodes, one token each.

    Shapes: `tokens`, `depth` and `end` are (N,); `end[i]` is one past the last descendant of i.
    `paths[r]` are the nodes of row r, root first.
    """

    tokens: tuple[int, ...]
    depth: tuple[int, ...]
    end: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]


def build_tree(rows: Sequence[Sequence[int]]) -> Tree:
    """Return the prefix tree of `rows`, non-empty sequences of token ids."""
    tokens: list[int] = []
    depth: list[int] = []
    end: list[int] = []
    paths: list[tuple[int, ...]] = [()] * len(rows)
    open_path: list[int] = []
    open_row: Sequence[int] = ()
    for index in sorted(range(len(rows)), key=lambda index: tuple(rows[index])):
        row = rows[index]
        shared = shared_prefix(open_row, row)
        _close(open_path[shared:], end, len(tokens))
        open_path = open_path[:shared]
        for position in range(shared, len(row)):
            open_path.append(len(tokens))
            tokens.append(row[position])
            depth.append(position)
            end.append(0)
        paths[index] = tuple(open_path)
        open_row = row
    _close(open_path, end, len(tokens))
    return Tree(tokens=tuple(tokens), depth=tuple(depth), end=tuple(end), paths=tuple(paths))


def padded(tree: Tree, multiple: int) -> Tree:
    """Return `tree` with nodes that no other node sees, up to a multiple of `multiple` nodes."""
    size = len(tree.tokens)
    more = range(size, size + -size % multiple)
    return Tree(
        tokens=tree.tokens + (0,) * len(more),
        depth=tree.depth + (0,) * len(more),
        end=tree.end + tuple(node + 1 for node in more),
        paths=tree.paths,
    )


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens two rows share."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def _close(nodes: Sequence[int], end: list[int], size: int) -> None:
    for node in nodes:
        end[node] = size
