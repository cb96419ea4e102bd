"""Several conversations about one picture in one sequence, as isolated as if each had been run alone.

Every turn sees the picture's prefix and itself, and its positions go on from the prefix, so training equals
single-turn use while the visual
tokens are paid once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dream_make.data.mixture import Pack

USER, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
END_ID = 2
FOCUS_WEIGHT = 2.0


@dataclass
class Packed:
    """ids (T,), positions (T,), mask (T, T) bool (True = may look), labels (T,) next-token ids or -100, weights (T,).

    ``visual`` are the slots of the picture; ``kept`` says which of its visual tokens they hold, in order.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    visual: slice
    kept: torch.Tensor


def _focus(answer: list[int], forms: list[list[list[int]]]) -> list[float]:
    """Weights of an answer's tokens. ``forms`` holds the spellings of each focus word; only the word's first mention
    weighs more, because later ones copy it: weighing them teaches a long answer to repeat the name."""
    weights = [1.0] * len(answer)
    for spellings in forms:
        found = [
            (start, len(form))
            for form in spellings
            for start in range(len(answer) - len(form) + 1)
            if answer[start : start + len(form)] == form
        ]
        if found:
            start, length = min(found)
            weights[start : start + length] = [FOCUS_WEIGHT] * length
    return weights


def pack_turns(pack: Pack, encode, visual_tokens: int, kept: torch.Tensor | None = None) -> Packed:
    """Lay out one pack. ``encode`` maps text to token ids without special additions.

    ``visual_tokens`` is the number of tokens of a picture. ``kept`` (sorted indices) leaves only these of them in the
    sequence, at their
    original positions; None keeps all.
    """
    start = encode(USER)
    if pack.image is None:
        kept, visual_tokens = torch.arange(0), 0
    elif kept is None:
        kept = torch.arange(visual_tokens)
    visual, after = slice(len(start), len(start) + len(kept)), len(start) + visual_tokens
    prefix = start + [END_ID] * len(kept)
    ids, labels, weights = list(prefix), [-100] * len(prefix), [0.0] * len(prefix)
    owner, positions = [-1] * len(prefix), list(range(len(start))) + (kept + len(start)).tolist()
    for index, turn in enumerate(pack.turns):
        lead = "\n" if pack.image is not None else ""
        question = encode(lead + turn.question + ASSISTANT)
        answer = [*encode(turn.answer), END_ID]
        weight = _focus(answer, [[encode(word), encode(" " + word)] for word in turn.focus])
        ids += question + answer
        labels += [-100] * (len(question) - 1) + answer + [-100]
        weights += [0.0] * (len(question) - 1) + weight + [0.0]
        owner += [index] * (len(question) + len(answer))
        positions += range(after, after + len(question) + len(answer))
    owner = torch.tensor(owner)
    length = len(ids)
    mask = torch.ones(length, length, dtype=torch.bool).tril() & ((owner[None] == owner[:, None]) | (owner[None] == -1))
    return Packed(
        torch.tensor(ids), torch.tensor(positions), mask, torch.tensor(labels), torch.tensor(weights), visual, kept
    )
