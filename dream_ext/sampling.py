"""The acceptance rule: emit what plain decoding would have emitted, follow the tree while it holds it.

Plain `generate` emits, at every step, a function of the prefix and of that step's noise.  The walk below evaluates the
same function, with the target's logits of the node that stands for the prefix.  No draft probability enters, so any
tree gives the target's own text; a draft that misses only ends the round early.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from dream_ext.ops._border import has_kernel, unit_stride
from dream_ext.ops._native import on_cuda
from dream_ext.ops.verify_tree import run_verify
from dream_ext.tree import Tree

Chooser = Callable[[Tensor], Tensor]


def greedy(scores: Tensor) -> Tensor:
    """(1, vocab) processed scores -> (1,) token id, the lowest id on ties."""
    return scores.argmax(dim=-1)


class Emitter:
    """One sequence being written: processors, choice, streamer and stopping criteria, token by token.

    Args:
        input_ids: (1, length) prompt.
        processors, criteria, config, streamer: as `generate` prepared them.
        choose: scores -> token.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer=None,
        choose: Chooser = greedy,
    ) -> None:
        self.input_ids = input_ids
        self.processors = processors
        self.criteria = criteria
        self.streamer = streamer
        self.choose = choose
        wanted = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None
        self.emitted = 0
        self.done = False

    @property
    def remaining(self) -> int | None:
        """Tokens until the length limit, or None when there is no limit."""
        limit = self.criteria.max_length
        return None if limit is None else limit - self.input_ids.shape[1]

    @property
    def argmax_alone(self) -> bool:
        """Whether every token is the argmax of its raw logits, and nobody wants to see them."""
        return self.choose is greedy and not self.processors and self.scores is None and self.logits is None

    def emit(self, logits: Tensor) -> int:
        """Choose, append and announce the token after the current prefix.

        Args:
            logits: (vocab,) the target's raw logits at the prefix.
        Returns:
            the token; `done` says whether it was the last.
        """
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self.processors(self.input_ids, raw)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        return self.append(self.choose(scores))

    def append(self, token: Tensor) -> int:
        """Append and announce a chosen token (1,); returns it as `emit` does."""
        self.input_ids = torch.cat([self.input_ids, token[:, None]], dim=-1)
        self.emitted += 1
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        self.done = bool(self.criteria(self.input_ids, self.scores).all())
        return int(token)


def walk(tree: Tree, logits: Tensor, emitter: Emitter, path: list[int]) -> None:
    """Emit from the root on, stepping to the child that holds the emitted token while there is one.

    Args:
        logits: (nodes, vocab) the target's raw logits after every node.
        path: receives the visited node ids, ascending, root first, also when a processor or the streamer raises.  Their
            tokens are exactly those of the text that the target has forwarded: the token emitted last is never among
            them.
    """
    if emitter.argmax_alone and has_kernel("verify_tree", logits) and not on_cuda(logits.device):
        _walk_argmax(tree, logits, emitter, path)
        return
    node: int | None = 0
    while node is not None:
        path.append(node)
        token = emitter.emit(logits[node])
        node = None if emitter.done else tree.child(node, token)


def _walk_argmax(tree: Tree, logits: Tensor, emitter: Emitter, path: list[int]) -> None:
    """`walk` where no token waits for the one before it: all of them are found in one pass, then emitted one by one."""
    nodes, bonus = run_verify(tree.tokens, tree.parents, unit_stride(logits))
    tokens = tree.tokens.tolist()
    for node, token in zip(nodes, [*(tokens[node] for node in nodes[1:]), bonus], strict=True):
        path.append(node)
        emitter.append(torch.tensor([token], device=emitter.input_ids.device))
        if emitter.done:
            return
