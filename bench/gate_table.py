"""The limits that `gate.py` holds every kernel against, by file of csrc/cuda.

Limits are what the kernel needs now and a small margin: about 8 registers, and no block of occupancy that its design
counts on. A change that crosses one is either a mistake or a decision, and a decision changes the row.
"""

from __future__ import annotations

from gate import Row

HALF = r"(?:__half|__nv_bfloat16)"
WORD = r"unsigned (?:char|short|int|long)"

ROWS = (
    # tree_attention, cross_attention: two blocks with 32 KB under way each hide the latency of memory (launch_table.h)
    Row(
        rf"attention_mma_kernel<{HALF}, (64), (\d)>",
        136,
        3,
        r"AttentionShape<\1, \2>::kBytes",
        0,
        14,
        16,
        12,
        blocks_80=2,
    ),
    Row(rf"attention_mma_kernel<{HALF}, (128), ([12])>", 176, 2, r"AttentionShape<\1, \2>::kBytes", 0, 28, 32, 24),
    Row(rf"attention_mma_kernel<{HALF}, (128), (4)>", 200, 2, r"AttentionShape<\1, \2>::kBytes", 0, 32, 64, 40),
    Row(rf"attention_mma_kernel<{HALF}, (256), (\d)>", 250, 1, r"AttentionShape<\1, \2>::kBytes", 0, 40, 64, 48),
    Row(r"attention_plain_kernel<float>", 148, 1, "plain_bytes(kMaxHeadDim)"),
    Row(r"attention_combine_kernel<.*>", 40, 12, ldg128=8),
    # attention_entropy: arithmetic decides, so three blocks of four warps overlap exponentials and products
    Row(rf"attention_entropy_kernel<({HALF}), (64)>", 136, 3, r"kEntropyShared<\1, \2>", 0, 16, 32, 16),
    Row(rf"attention_entropy_kernel<({HALF}), (128)>", 168, 3, r"kEntropyShared<\1, \2>", 0, 32, 64, 32, blocks_80=2),
    Row(rf"attention_entropy_kernel<({HALF}), (256)>", 128, 1, r"kEntropyShared<\1, \2>", 0, 64, 128, 64),
    Row(r"attention_entropy_kernel<(float), (\d+)>", 130, 1, r"kEntropyShared<\1, \2>", 0, 16),
    # attention_mass: a pass over rows, a pass over keys, and the sum over heads
    Row(rf"attention_mass_rows_kernel<({HALF}), (64)>", 136, 2, r"kMassRowsShared<\1, \2>", 0, 18, 32, 16),
    Row(rf"attention_mass_rows_kernel<({HALF}), (128)>", 170, 2, r"kMassRowsShared<\1, \2>", 0, 36, 64, 32),
    Row(rf"attention_mass_rows_kernel<({HALF}), (256)>", 146, 1, r"kMassRowsShared<\1, \2>", 0, 72, 128, 64),
    Row(r"attention_mass_rows_kernel<(float), (\d+)>", 136, 1, r"kMassRowsShared<\1, \2>", 0, 16),
    Row(rf"attention_mass_keys_kernel<({HALF}), (64)>", 122, 2, r"kMassKeysShared<\1, \2>", 0, 12, 32, 16),
    Row(rf"attention_mass_keys_kernel<({HALF}), (128)>", 132, 2, r"kMassKeysShared<\1, \2>", 0, 24, 64, 32),
    Row(rf"attention_mass_keys_kernel<({HALF}), (256)>", 166, 1, r"kMassKeysShared<\1, \2>", 0, 48, 128, 64),
    Row(r"attention_mass_keys_kernel<(float), (\d+)>", 110, 1, r"kMassKeysShared<\1, \2>", 0, 16),
    Row(r"attention_mass_sum_kernel", 32, 16),
    # expand_tree: four words in flight a thread; the loads of three blocks of 256 hide each other (launch_table.h)
    Row(r"expand_rows_kernel<.*>", 80, 3, ldg128=4),
    Row(r"merge_rows_kernel", 32, 2, "merge_bytes(kMaxRowSplits, kMaxDeviceWidth)"),
    # verify_tree, sample_tree: rows of a vocabulary as above, then one block a sequence walks
    Row(r"choose_rows_kernel<.*>", 64, 4, ldg128=4),
    Row(r"sample_rows_kernel", 64, 4, ldg128=4),
    Row(r"walk_tree_kernel", 40, 4),
    # rank_tree: one block a sequence
    Row(r"rank_tree_kernel", 40, 4),
    # select_visual: one block selects, many gather
    Row(r"select_visual_kernel", 40, 1),
    Row(r"gather_rows_kernel", 48, 8, ldg128=12),
    # keep_path: latency of scattered rows, so many threads, and the loads of a group before its stores
    Row(r"keep_path_kernel<uint4>", 56, 8, ldg128=4),
    Row(rf"keep_path_kernel<{WORD}>", 48, 10),
)
