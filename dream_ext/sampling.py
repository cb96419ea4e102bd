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

from dream_ext import compat
from dream_ext.noise import Sampler
from dream_ext.ops._border import has_kernel, unit_stride
from dream_ext.ops._native import on_cuda
from dream_ext.ops.verify_tree import run_verify
from dream_ext.tree import Tree

Chooser = Callable[[Tensor], Tensor]


def greedy(scores: Tensor) -> Tensor:
    """(rows, vocab) processed scores -> (rows,) token ids, the lowest id on ties."""
    return scores.argmax(dim=-1)


class Emitter:
    """Sequences being written, one token each a step: processors, choice, streamer and stopping criteria.

    Args:
        input_ids: (rows, length) prompts.
        processors, criteria, config, streamer: as `generate` prepared them.
        choose: scores -> tokens.

    Attributes:
        emitted: steps so far; written: tokens of all rows, padding not counted.
        unfinished: for each row, whether no criterion has ended it; all rows go on until none is unfinished (`done`).
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
        # As in plain decoding a finished row goes on, with padding where a criterion knows of ends.
        ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.pad: int | None = int(config._pad_token_tensor) if ends and self.rows > 1 else None
        self.unfinished = [True] * self.rows
        self.emitted = self.written = 0
        self.done = False

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def remaining(self) -> int | None:
        """Tokens until the length limit, or None when there is no limit."""
        limit = self.criteria.max_length
        return None if limit is None else limit - self.input_ids.shape[1]

    @property
    def silent(self) -> bool:
        """Whether nobody wants to see scores."""
        return self.scores is None and self.logits is None

    @property
    def argmax_alone(self) -> bool:
        """Whether every token is the argmax of its raw logits, and nobody wants to see them."""
        return self.choose is greedy and not self.processors and self.silent

    def raw(self, logits: Tensor) -> Tensor:
        """A copy of logits as processors get them."""
        return logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)

    def emit(self, logits: Tensor) -> int:
        """`emit_rows` of a single sequence: raw logits (vocab,) -> its token."""
        return self.emit_rows(logits[None])[0]

    def emit_rows(self, logits: Tensor) -> list[int]:
        """Choose, append and announce the token after the current prefix of every row.

        Args:
            logits: (rows, vocab) the target's raw logits at the prefixes.
        Returns:
            the tokens; `done` says whether they were the last.
        """
        raw = self.raw(logits)
        scores = self.processors(self.input_ids, raw)
        self.record(scores, raw)
        tokens = self.choose(scores, self.unfinished) if isinstance(self.choose, Sampler) else self.choose(scores)
        return self.append(tokens)

    def record(self, scores: Tensor, raw: Tensor) -> None:
        """Keep one step's processed scores and raw logits, (rows, vocab) fp32 each, for whoever wants to see them."""
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)

    def append(self, tokens: Tensor) -> list[int]:
        """Append and announce chosen tokens (rows,), padding in their place where a row is finished; returns them."""
        if not all(self.unfinished) and self.pad is not None:
            live = torch.tensor(self.unfinished, device=tokens.device)
            tokens = tokens.where(live, self.pad)
        self.input_ids = torch.cat([self.input_ids, tokens[:, None]], dim=-1)
        self.emitted += 1
        self.written += self.rows if self.pad is None else sum(self.unfinished)
        if self.streamer is not None and compat.STREAMS_FIRST:
            self.streamer.put(tokens.cpu())
        ended = self.criteria(self.input_ids, self.scores).tolist()
        self.unfinished = [live and not end for live, end in zip(self.unfinished, ended, strict=True)]
        if self.streamer is not None and not compat.STREAMS_FIRST:
            self.streamer.put(tokens.cpu())
        self.done = not any(self.unfinished)
        return tokens.tolist()


def walk(tree: Tree, logits: Tensor, emitter: Emitter, path: list[int]) -> None:
    """Emit a single sequence from the root on, stepping to the child that holds the emitted token while there is one.

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
