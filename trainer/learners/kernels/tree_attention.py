"""Attend within a prefix tree, block by block, skipping the nodes that a block cannot see.

Nodes are in depth-first pre-order, so a block of consecutive queries [s, e) sees only the
ancestors of s and the block itself: if a node before s is an ancestor of any node in the block, it
has s in its subtree, too. A block costs (e − s)·(depth(s) + e − s) instead of (e − s)·N. Small
blocks compute few masked scores, and many of them are batched into one product. This is for
CPUs; on a GPU flex attention (arXiv:2412.05496) skips the blocks that no query sees.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.batches import Tree
from trainer.learners.kernels.layers import product

# The name of this attention in transformers.
TREE_ATTENTION: Final = "pawl_tree"
# Queries in a block.
BLOCK: Final = 48
# Most mask entries of a batch of blocks, so that scores stay in the cache.
MAX_MASK_ENTRIES: Final = 2**16
# The fewest keys of a block in a batch, as a share of those of the batch's largest block.
MIN_KEY_SHARE: Final = 0.7
FLEX_BLOCK: Final = 128


class QueryBlock(NamedTuple):
    """Queries [start, stop), and the nodes that at least one of them sees, in runs [from, to).

    Shapes: `mask` (stop − start, K), 0 or −inf, is added to scores; K is the number of
    nodes in all runs.
    """

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    mask: Tensor


class BlockBatch(NamedTuple):
    """Z blocks that are computed together: each has B queries, and its keys are padded to K.

    `queries` (Z, B) and `keys` (Z, K) hold node indices; `mask` is (Z, B, K). Padding is node 0,
    which the mask hides. A run (z, start, stop, offset) is a range of nodes: the keys of block z
    are start, start + 1, ..., stop - 1 in the columns from `offset` on.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor
    runs: tuple[tuple[int, int, int, int], ...]


def blocks_of(tree: Tree, block: int = BLOCK) -> list[QueryBlock]:
    """Return the blocks of `tree`, with `block` queries each; the last may have fewer."""
    end = torch.tensor(tree.end)
    blocks = []
    for start in range(0, len(tree.tokens), block):
        stop = min(start + block, len(tree.tokens))
        ancestors = torch.nonzero(end[:start] > start)[:, 0]
        keys = torch.cat([ancestors, torch.arange(start, stop)])
        query = torch.arange(start, stop)[:, None]
        seen = (keys <= query) & (query < end[keys])
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        blocks.append(QueryBlock(start, stop, _runs(keys.tolist()), mask))
    return blocks


def _runs(nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs [from, to) of consecutive nodes among ascending `nodes`."""
    starts = [i for i, node in enumerate(nodes) if i == 0 or nodes[i - 1] != node - 1]
    ends = [*starts[1:], len(nodes)]
    return tuple((nodes[a], nodes[b - 1] + 1) for a, b in zip(starts, ends, strict=True))


def batch_blocks(
    blocks: Sequence[QueryBlock], max_entries: int = MAX_MASK_ENTRIES
) -> list[BlockBatch]:
    """Batch blocks, with masks of at most `max_entries` entries unless one block alone has more."""
    groups: list[list[QueryBlock]] = []
    for block in sorted(blocks, key=lambda block: block.mask.shape, reverse=True):
        first = groups[-1][0].mask if groups else None
        if (
            first is None
            or len(block.mask) != len(first)
            or (len(groups[-1]) + 1) * first.numel() > max_entries
            or block.mask.shape[1] < MIN_KEY_SHARE * first.shape[1]
        ):
            groups.append([])
        groups[-1].append(block)
    return [_pad_to_batch(group) for group in groups]


def _pad_to_batch(blocks: Sequence[QueryBlock]) -> BlockBatch:
    size, width = blocks[0].mask.shape
    keys = torch.zeros(len(blocks), width, dtype=torch.long)
    mask = torch.full((len(blocks), size, width), float("-inf"))
    runs = []
    for place, block in enumerate(blocks):
        offset = 0
        for start, stop in block.runs:
            keys[place, offset : offset + stop - start] = torch.arange(start, stop)
            runs.append((place, start, stop, offset))
            offset += stop - start
        mask[place, :, :offset] = block.mask
    queries = torch.stack([torch.arange(block.start, block.stop) for block in blocks])
    return BlockBatch(queries, keys, mask, tuple(runs))


class TreeAttention(Function):
    """Compute softmax(scale·q·kᵀ + mask)·v; q (N, H, D), k (N, G, D), v (N, G, E), G divides H."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, batches: Sequence[BlockBatch], scale: float
    ) -> Tensor:
        """Return the attention's output, (N, H, E)."""
        ctx.batches, ctx.scale = batches, scale
        groups, outputs = k.shape[1], []
        for batch in batches:
            queries = _gather(q, batch.queries, groups).mul_(scale)
            p = _attention_weights(queries, _gather(k, batch.keys, groups), batch)
            outputs.append(product(p, _gather(v, batch.keys, groups)))
        ctx.save_for_backward(q, k, v)
        return _by_node(outputs, batches, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v; the attention weights are computed again."""
        q, k, v = ctx.saved_tensors
        groups, outputs = k.shape[1], []
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for batch in ctx.batches:
            queries = _gather(q, batch.queries, groups).mul_(ctx.scale)
            keys, values = _gather(k, batch.keys, groups), _gather(v, batch.keys, groups)
            do = _gather(d_out, batch.queries, groups)
            p = _attention_weights(queries, keys, batch)
            _scatter_add(dv, product(p.mT, do), batch)
            ds = torch._softmax_backward_data(product(do, values.mT), p, -1, p.dtype)
            _scatter_add(dk, product(ds.mT, queries), batch)
            outputs.append(product(ds, keys).mul_(ctx.scale))
        return _by_node(outputs, ctx.batches, q), dk, dv, None, None


def _gather(x: Tensor, nodes: Tensor, groups: int) -> Tensor:
    """Gather `x` (N, G·R, D) at `nodes` (Z, B), by the G groups of heads: (Z·G, B·R, D)."""
    rows = x.reshape(len(x) * groups, -1)
    places = (nodes * groups)[:, None] + torch.arange(groups)[:, None]
    taken = rows.index_select(0, places.flatten())
    return taken.view(len(nodes) * groups, -1, x.shape[-1])


def _by_node(outputs: Sequence[Tensor], batches: Sequence[BlockBatch], like: Tensor) -> Tensor:
    """Put the batches' outputs, (Z·G, B·R, E) each, in the order of nodes: (N, H, E)."""
    out = torch.empty((*like.shape[:2], outputs[0].shape[-1]), dtype=like.dtype)
    for part, batch in zip(outputs, batches, strict=True):
        size, queries = batch.queries.shape
        heads = part.view(size, -1, queries, part.shape[1] // queries, part.shape[2])
        out[batch.queries] = heads.transpose(1, 2).flatten(2, 3)
    return out


def _scatter_add(total: Tensor, part: Tensor, batch: BlockBatch) -> None:
    """Add a batch's gradients by key, (Z·G, K, D), to those of all nodes, (N, G, D), in place."""
    by_block = part.view(len(batch.keys), -1, *part.shape[1:]).transpose(1, 2)
    for place, start, stop, offset in batch.runs:
        total[start:stop] += by_block[place, offset : offset + stop - start]


def _attention_weights(queries: Tensor, keys: Tensor, batch: BlockBatch) -> Tensor:
    """Return the weights, (Z·G, B·R, K), of keys (Z·G, K, D) for queries (Z·G, B·R, D)."""
    blocks, size, seen = batch.mask.shape
    scores = product(queries, keys.mT)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide.view(blocks, len(keys) // blocks, size, -1, seen).add_(batch.mask[:, None, :, None])
    return torch.softmax(wide, -1).to(scores.dtype)


def tree_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention by transformers' interface: (1, H, N, D) in, (1, N, H, D) out.

    The model passes on the keyword argument `tree`, which `attention_tree` made. Without it this is
    the usual attention.
    """
    tree = kwargs.pop("tree", None)
    if tree is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, **kwargs
        )
        return plain
    if isinstance(tree, BlockMask):
        return flex_attention_forward(module, query, key, value, tree, **kwargs)[0], None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return TreeAttention.apply(q, k, v, tree, kwargs["scaling"])[None], None


def attention_tree(tree: Tree, device: torch.device) -> list[BlockBatch] | BlockMask:
    """Return `tree` for attention on `device`: blocks on a CPU, else flex attention's mask."""
    if device.type == "cpu":
        return batch_blocks(blocks_of(tree))
    return block_mask(torch.tensor(tree.end, device=device))


def block_mask(end: Tensor) -> BlockMask:
    """Return flex attention's mask of a tree with the interval ends `end` (N,).

    Node i is an ancestor of the nodes in [i, end[i]). N must be a multiple of `FLEX_BLOCK`. Nothing
    of size N × N is ever allocated.
    """
    nodes = torch.arange(len(end), device=end.device)
    starts = nodes[::FLEX_BLOCK, None]
    stops = starts + FLEX_BLOCK
    blocks = (len(starts), len(starts), FLEX_BLOCK)
    some = ((nodes < stops) & (end > starts)).view(blocks).any(-1)
    whole = ((nodes <= starts) & (end >= stops)).view(blocks).all(-1)

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~whole), *_block_lists(whole), BLOCK_SIZE=FLEX_BLOCK, mask_mod=seen
    )


def _block_lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's number of true entries, and all indices, true entries first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int()[None, None], order.int()[None, None]


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
