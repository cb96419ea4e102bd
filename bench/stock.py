"""What stock torch does in place of an operator, with a leading batch dimension: the other side of bench/gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dream_ext.blocks import rotate


def expand(logits: Tensor, scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    top = torch.log_softmax(logits.float(), -1).topk(width)
    cumulative = top.values + scores[..., None]
    return top.indices, cumulative, cumulative.flatten(-2).topk(width).indices


def rank(scores: Tensor, parents: Tensor, nodes: int) -> list[tuple[list[int], list[int]]]:
    """Picked candidates and ancestor bits of every sequence, with a loop over nodes on the host."""
    found = []
    picks = scores.topk(min(nodes - 1, scores.shape[-1])).indices.sort(-1).values
    for picked, above in zip(picks.tolist(), parents.tolist(), strict=True):
        node_of, ancestors = {-1: 0}, [1]
        for node, candidate in enumerate(picked, start=1):
            node_of[candidate] = node
            ancestors.append(ancestors[node_of[above[candidate]]] | 1 << node)
        found.append((picked, ancestors))
    return found


def _walk(tokens: Tensor, parents: Tensor, choices: Tensor) -> list[tuple[list[int], int]]:
    """Path and bonus of every sequence, walked on the host."""
    found = []
    for token, parent, chosen in zip(tokens.tolist(), parents.tolist(), choices.tolist(), strict=True):
        path: list[int] = [0]
        while path[-1] is not None:
            children = (i for i, p in enumerate(parent) if p == path[-1] and token[i] == chosen[path[-1]])
            path.append(next(children, None))
        found.append((path[:-1], chosen[path[-2]]))
    return found


def verify(tokens: Tensor, parents: Tensor, logits: Tensor) -> list[tuple[list[int], int]]:
    return _walk(tokens, parents, logits.argmax(-1))


def sample(tokens: Tensor, parents: Tensor, depth: Tensor, p: Tensor, noise: Tensor) -> list[tuple[list[int], int]]:
    drawn = noise.gather(1, depth[:, :, None].expand(-1, -1, noise.shape[-1]))
    return _walk(tokens, parents, (p / drawn).argmax(-1))


def keep(buffers: Sequence[Tensor], start: Tensor, path: Tensor) -> None:
    """``start`` (batch,) and ``path`` (batch, width) on the buffers' device."""
    slots = start[:, None] + path
    to = start[:, None] + torch.arange(path.shape[1], device=path.device)
    batch = torch.arange(path.shape[0], device=path.device)[:, None]
    for buffer in buffers:
        buffer[batch, :, to] = buffer[batch, :, slots]


def select(scores: Tensor, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    rows = scores.topk(count).indices.sort().values
    return rows, *(tensor.index_select(0, rows) for tensor in tensors)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, ancestors: Tensor, tree: int, scale: float
) -> Callable[[], Any]:
    """As transformers' SDPA route does it: keys and values repeated for every head, one dense mask made beforehand."""
    behind = torch.arange(k.shape[2], device=k.device) - lengths[:, None, None]
    sees = ((behind < 0) | ((ancestors[:, :, None] >> behind.clamp(0, 63)) & 1 == 1) & (behind < tree))[:, None]
    groups = q.shape[1] // k.shape[1]

    def attend(q: Tensor = q) -> Tensor:
        keys, values = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=sees, scale=scale).transpose(1, 2).contiguous()

    return attend


def cross_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, ancestors: Tensor, tree: int, scale: float,
    q_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
) -> Callable[[], Any]:  # fmt: skip
    attend = tree_attention(q, k, v, lengths, ancestors, tree, scale)
    return lambda: attend(rotate(F.rms_norm(q, (q.shape[-1],), q_norm, eps), cos[:, None], sin[:, None]))
