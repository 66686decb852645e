"""Attention within a prefix tree, block by block: what no token may see is not computed.

Nodes are in depth-first pre-order, so a block of consecutive queries [s, e) sees nothing but
the ancestors of s and the block itself: an ancestor of any of its nodes that comes before s
has s in its subtree, too. A block costs (e − s)·(depth(s) + e − s) instead of (e − s)·N. This is
for CPUs; on a GPU flex attention (arXiv:2412.05496) skips the blocks that nobody sees.
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

from trainer.learners.products import batch_times_transposed
from trainer.trees import Tree

# What transformers calls this attention.
NAME: Final = "pawl_tree"
BLOCK: Final = 128
FLEX_BLOCK: Final = 128


class Block(NamedTuple):
    """Queries [start, stop), and the nodes that one of them sees, in runs [from, to).

    Shapes: `mask` (stop − start, K), 0 or −inf, to be added to scores; K nodes in all runs.
    """

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    mask: Tensor


def blocks_of(tree: Tree, block: int = BLOCK) -> list[Block]:
    """The blocks of `tree`."""
    end = torch.tensor(tree.end)
    found = []
    for start in range(0, len(tree.tokens), block):
        stop = min(start + block, len(tree.tokens))
        ancestors = torch.nonzero(end[:start] > start)[:, 0]
        keys = torch.cat([ancestors, torch.arange(start, stop)])
        query = torch.arange(start, stop)[:, None]
        seen = (keys <= query) & (query < end[keys])
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        found.append(Block(start, stop, _runs(keys.tolist()), mask))
    return found


def _runs(nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending nodes as runs of consecutive ones."""
    starts = [i for i, node in enumerate(nodes) if i == 0 or nodes[i - 1] != node - 1]
    ends = [*starts[1:], len(nodes)]
    return tuple((nodes[a], nodes[b - 1] + 1) for a, b in zip(starts, ends, strict=True))


class TreeAttention(Function):
    """softmax(scale·q·kᵀ + mask)·v for q (N, H, D), k and v (N, G, D), G dividing H."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        ctx.blocks, ctx.scale = blocks, scale
        q, k, v = (_by_group(x, k.shape[1]) for x in (q * scale, k, v))
        out = torch.empty_like(q)
        for block in blocks:
            p = _weights(_at(q, block), _seen(k, block), block)
            _put(out, block, batch_times_transposed(p, _seen(v, block).mT))
        ctx.save_for_backward(q, k, v)
        return _by_node(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        d_out = _by_group(d_out, len(k))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in ctx.blocks:
            queries, keys, do = _at(q, block), _seen(k, block), _at(d_out, block)
            p = _weights(queries, keys, block)
            dp = batch_times_transposed(do, _seen(v, block))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            _put(dq, block, batch_times_transposed(ds, keys.mT))
            _add(dk, block, batch_times_transposed(queries.mT.contiguous(), ds.mT).mT)
            _add(dv, block, batch_times_transposed(do.mT.contiguous(), p.mT).mT)
        return _by_node(dq).mul_(ctx.scale), _by_node(dk), _by_node(dv), None, None


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(N, H, D) as (G, N, H / G, D): for each key-value head, the heads that share it."""
    grouped: Tensor = x.unflatten(1, (groups, -1)).transpose(0, 1).contiguous()
    return grouped


def _by_node(x: Tensor) -> Tensor:
    """(G, N, R, D) as (N, G·R, D)."""
    return x.transpose(0, 1).flatten(1, 2)


def _at(x: Tensor, block: Block) -> Tensor:
    """The rows of (G, N, R, D) that belong to a block's queries, as (G, B·R, D)."""
    return x[:, block.start : block.stop].flatten(1, 2)


def _put(x: Tensor, block: Block, values: Tensor) -> None:
    x[:, block.start : block.stop].flatten(1, 2).copy_(values)


def _seen(x: Tensor, block: Block) -> Tensor:
    """The rows of (G, N, 1, D) that a block sees, (G, K, D)."""
    return torch.cat([x[:, start:stop, 0] for start, stop in block.runs], 1)


def _add(total: Tensor, block: Block, values: Tensor) -> None:
    sizes = [stop - start for start, stop in block.runs]
    for (start, stop), part in zip(block.runs, values.split(sizes, 1), strict=True):
        total[:, start:stop, 0] += part


def _weights(queries: Tensor, keys: Tensor, block: Block) -> Tensor:
    """What each query (G, B·R, D) takes of each key (G, K, D)."""
    size, seen = block.mask.shape
    scores = batch_times_transposed(queries, keys)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide.view(len(wide), size, -1, seen).add_(block.mask[:, None])
    return torch.softmax(wide, -1).to(scores.dtype)


def tree_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, N, D) in, (1, N, H, D) out.

    `tree` is what `attention_tree` made; the model passes it on with the other arguments.
    Without one this is attention as everywhere.
    """
    tree = kwargs.pop("tree", None)
    if tree is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, **kwargs
        )
        return plain
    if isinstance(tree, BlockMask):
        return flex_attention_forward(module, query, key, value, tree, **kwargs)[0], None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return TreeAttention.apply(q, k, v, tree, kwargs["scaling"])[None], None


def attention_tree(tree: Tree, device: torch.device) -> list[Block] | BlockMask:
    """What attention on `device` needs to know of `tree`: blocks, or flex attention's mask."""
    if device.type == "cpu":
        return blocks_of(tree)
    return block_mask(torch.tensor(tree.end, device=device))


def block_mask(end: Tensor) -> BlockMask:
    """Flex attention's mask of a tree of `end` (N,), N a multiple of its block's size.

    Made from intervals: nothing of N × N is ever laid out.
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
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=FLEX_BLOCK, mask_mod=seen
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are chosen, and which: those first."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int()[None, None], order.int()[None, None]


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
