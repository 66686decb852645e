"""Measure the multiplications that an update needs, and what the machine can do at best."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.batches.rows import Row
from trainer.batches.trees import build_tree
from trainer.learners.kernels.products import product


def needed_flops(model: Any, batches: Sequence[Sequence[Row]], *, merge: bool = True) -> float:
    """Return the floating-point operations of forward and backward, a multiply-add as two.

    Of a frozen matrix there is no weight gradient; nothing is computed twice; a token attends
    to what it sees; the first layer's inputs need no gradient; the head sees the nodes before
    sampled tokens.
    """
    config = model.config
    total = 0.0
    for rows in batches:
        reads = [row.inputs for row in rows]
        trees = [build_tree(reads)] if merge else [build_tree([ids]) for ids in reads]
        nodes = sum(len(tree.tokens) for tree in trees)
        seen = sum(depth + 1 for tree in trees for depth in tree.depth)
        heads = {(tree, node) for tree, node in _head_nodes(rows, merge=merge)}
        total += nodes * _per_token(model)
        total += 12.0 * seen * _width(config) * config.num_hidden_layers
        total += 4.0 * len(heads) * config.hidden_size * config.vocab_size
    return total


def _head_nodes(rows: Sequence[Row], *, merge: bool) -> list[tuple[int, int]]:
    if not merge:
        return [(i, n) for i, row in enumerate(rows) for n in range(len(row.sampled_ids))]
    tree = build_tree([row.inputs for row in rows])
    return [
        (0, node)
        for row, path in zip(rows, tree.paths, strict=True)
        for node in path[len(row.prompt_ids) - 1 :]
    ]


def _width(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size * int(config.num_attention_heads)


def _per_token(model: Any) -> float:
    total = 0.0
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        base, rank = module.get_base_layer(), module.r["default"]
        inner, outer = base.in_features, base.out_features
        first = ".layers.0." in name and name.rsplit(".", 1)[1] in ("q_proj", "k_proj", "v_proj")
        total += (2.0 if first else 4.0) * inner * outer
        total += 6.0 * rank * (inner + outer) - (2.0 * rank * inner if first else 0.0)
    return total


def peaks(dtype: torch.dtype, device: str, *, quick: bool = False) -> dict[str, float]:
    """Measure the best matrix products of this machine, now, in operations a second.

    `mm` is torch's own, `best` that or oneDNN's (`trainer.learners.kernels.products`), each the
    best over large matrices and over shapes of the model, the second matrix as it is or transposed.
    """
    large = 8192 if device == "cuda" else 2048
    shapes = [(1024, 576, 576), (1024, 576, 1536), (1024, 1536, 576), (large, large, large)]
    shapes = shapes[:1] if quick else shapes
    # Long enough to be measured, short enough to find a moment that is undisturbed.
    least = 0.0 if quick else 1e13 if device == "cuda" else 1e10
    pairs = [pair for shape in shapes for pair in _operands(shape, dtype, device)]
    plain = max(_rate(torch.mm, *pair, least) for pair in pairs)
    other = max(_rate(product, *pair, least) for pair in pairs)
    return {"mm": plain, "best": max(plain, other)}


def _operands(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> list[tuple[Tensor, Tensor]]:
    """Return two matrices; and the same, the second laid out by columns."""
    rows, inner, columns = shape
    left = torch.randn(rows, inner, dtype=dtype, device=device)
    right = torch.randn(inner, columns, dtype=dtype, device=device)
    return [(left, right), (left, right.T.contiguous().T)]


def _rate(
    multiply: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, least: float
) -> float:
    """Return operations a second, the best of five times at least `least` of them."""
    operations = 2.0 * left.numel() * right.shape[1]
    repeats = max(1, int(least / operations))
    return max(
        operations * repeats / seconds(lambda: [multiply(left, right) for _ in range(repeats)])
        for _ in range(5)
    )


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes, the GPU's part included."""
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def wait() -> None:
    """Wait until the GPU, if there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
