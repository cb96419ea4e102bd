"""The three losses of drafter training (method, section 5), all in fp32, all means over supervised rows only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dream_ext.blocks import unit_rms


def kl_loss(draft_logits: Tensor, target_logits: Tensor, target_lse: Tensor) -> Tensor:
    """KL(target || draft) summed over the vocabulary, mean over rows -> scalar.

    Args:
        draft_logits, target_logits: (n, Vd) over the draft vocabulary.
        target_lse: (n,) fp32 log-sum-exp of the target's logits over its *full* vocabulary. With a reduced draft
            vocabulary the sum runs over the drafted tokens, and a row counts as much as the target's mass on them.
    """
    log_p = target_logits.float() - target_lse.float()[:, None]
    log_q = torch.log_softmax(draft_logits.float(), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def feature_loss(hidden: Tensor, target: Tensor) -> Tensor:
    """Smooth-L1 between the draft's final rows and the target's last features, both (n, hidden) -> scalar."""
    return F.smooth_l1_loss(hidden.float(), target.float())


def intermediate_loss(initial: Tensor, target: Tensor, eps: float = 1e-5) -> Tensor:
    """Smooth-L1 between the initial block's rows and the target's entropy-chosen layer, both (n, hidden) -> scalar.

    Both sides are brought to unit RMS first: the residual stream of a target has a scale of its own in every layer,
        with a few channels
    in the hundreds, and would drown the other losses.
    """
    return F.smooth_l1_loss(unit_rms(initial.float(), eps), unit_rms(target.float(), eps))
