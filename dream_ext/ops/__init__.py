"""Compiled operators, each beside its reference in plain PyTorch: ``op`` and ``op_ref``.

The tensor's device chooses the kernel. An operator never becomes its reference by itself: what is not built is
refused in words.
All operators are for inference: an input that requires grad under enabled grad is an error.
"""

from . import _compiled  # noqa: F401  registers the operators that torch.compile sees
from .attention_entropy import attention_entropy, attention_entropy_ref
from .attention_mass import attention_mass, attention_mass_ref
from .block_merge import block_merge, block_merge_ref
from .block_project import block_project, block_project_ref
from .block_step import block_step, block_step_ref
from .cross_attention import cross_attention, cross_attention_ref
from .expand_tree import expand_tree, expand_tree_ref
from .keep_path import keep_path, keep_path_ref
from .rank_tree import rank_tree, rank_tree_ref
from .rms_norm import rms_norm, rms_norm_ref
from .rounded_linear import RoundedWeight, rounded_linear, rounded_linear_ref
from .sample_tree import sample_tree, sample_tree_ref
from .select_visual import select_visual, select_visual_ref
from .skinny_linear import PackedWeight, skinny_linear, skinny_linear_ref
from .tree_attention import tree_attention, tree_attention_ref
from .verify_tree import verify_tree, verify_tree_ref

__all__ = [
    "PackedWeight",
    "RoundedWeight",
    "attention_entropy",
    "attention_entropy_ref",
    "attention_mass",
    "attention_mass_ref",
    "block_merge",
    "block_merge_ref",
    "block_project",
    "block_project_ref",
    "block_step",
    "block_step_ref",
    "cross_attention",
    "cross_attention_ref",
    "expand_tree",
    "expand_tree_ref",
    "keep_path",
    "keep_path_ref",
    "rank_tree",
    "rank_tree_ref",
    "rms_norm",
    "rms_norm_ref",
    "rounded_linear",
    "rounded_linear_ref",
    "sample_tree",
    "sample_tree_ref",
    "select_visual",
    "select_visual_ref",
    "skinny_linear",
    "skinny_linear_ref",
    "tree_attention",
    "tree_attention_ref",
    "verify_tree",
    "verify_tree_ref",
]
