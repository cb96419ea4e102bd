"""What tests/simt.py must catch: faulty kernels, faults planted in the operators' kernels, missing synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

# Kernels of tests/native/device_faults.cpp: (name, mode of the build, words of the report).
FAULTS = (
    ("shared_overflow", "address", "runtime error: index 64 out of bounds"),
    ("dynamic_shared_overflow", "address", "AddressSanitizer: heap-buffer-overflow"),
    ("out_of_bounds", "address", "AddressSanitizer: heap-buffer-overflow"),
    ("misaligned", "address", "runtime error: member access within misaligned address"),
    ("uninitialised_local", "address", "a wrong value"),
    ("uninitialised_shared", "plain", "a wrong value"),
    ("divergent_barrier", "plain", "divergent barrier"),
    ("barrier_after_exit", "plain", "barrier after 24 of 64 threads have exited"),
    ("partial_shuffle", "plain", "which has exited"),
    ("shuffle_after_exit", "plain", "which has exited"),
    ("missing_barrier", "thread", "ThreadSanitizer: data race"),
    ("missing_syncwarp", "thread", "ThreadSanitizer: data race"),
    ("missing_second_barrier", "thread", "ThreadSanitizer: data race"),
    ("racy_histogram", "thread", "ThreadSanitizer: data race"),
    ("racy_blocks", "thread", "ThreadSanitizer: data race"),
    ("missing_copy_wait", "plain", "a wrong value"),
    ("missing_copy_barrier", "thread", "ThreadSanitizer: data race"),
    ("too_much_shared", "plain", "the limit is"),
    ("more_than_prepared", "plain", "prepared for"),
    ("never_prepared", "plain", "never prepared"),
)


@dataclass(frozen=True)
class Planted:
    """A fault to plant in a copy of a kernel."""

    operator: str
    file: str
    old: str
    new: str
    detector: str


# (operator that runs, file of csrc/cuda): (a text that the file holds once, what stands there instead, who sees it).
# value: a comparison fails, or the emulator reports an error; schedule: so it is, or the bits change, in some order of
# threads, with some content of fresh memory, or at some time of copies; address, thread: the sanitizer reports it.
PLANTED_BY_FILE = {
    ("keep_path", "keep_path.cu"): (
        ("slot > i && slot", "slot >= 0 && slot", "value"),
        ("slot < buffer.capacity - start", "slot <= buffer.capacity - start", "address"),
        ("first + j) * buffer.slot_stride", "first + j + 1) * buffer.slot_stride", "value"),
        ("launch.path + int64_t{sequence} * launch.width", "launch.path", "value"),
        ("first += kLaunchBuffers", "first += kLaunchBuffers + 1", "value"),
        ("column += kWarp", "column += kWarp / 2", "thread"),
        ("x.row_bytes | x.batch_stride", "x.batch_stride", "value"),
    ),
    ("expand_tree", "expand_tree.cu"): (
        (
            "  __syncthreads();\n  if (warp > 0) return;\n  const int64_t part",
            "  if (warp > 0) return;\n  const int64_t part",
            "value",
        ),
        ("  __syncwarp();  // the next row's entries come to the same place\n", "", "thread"),
        (
            "  __syncthreads();\n  if (warp > 0) return;\n  TopList top",
            "  if (warp > 0) return;\n  TopList top",
            "value",
        ),
        ("entry_.order >= entry.order", "entry_.order > entry.order", "value"),
        ("mine.sum = mine.sum * shrink(mine.high, high)", "mine.sum = mine.sum", "value"),
        ("__shfl_sync(kAllLanes, entry_.order, width_ - 1)", "__shfl_sync(kAllLanes, entry_.order, width_)", "value"),
        ("blockIdx.y * p.row_stride", "blockIdx.y * p.vocab", "value"),
        ("head = ++next < end ? *next : nothing", "head = *++next", "address"),
        ("      x = fmaxf(x, -kInfinity);  // of a number and NaN the number is taken\n", "", "value"),
    ),
    ("expand_tree", "vocab_rows.cuh"): (
        ("wanted && id >= 0 && id < vocab", "wanted && id < vocab", "value"),
        ("(row.vocab + 2 * Row::kItems - 2)", "(row.vocab + Row::kItems - 1)", "value"),
        ("const bool wanted = word < range.end;", "const bool wanted = true;", "value"),
        ("turn += kThreads * kFlight", "turn += kThreads * kFlight + kWarp", "value"),
    ),
    ("verify_tree", "verify_tree.cu"): (
        (
            "for (const auto x : items.x) over |= !(x <= high);",
            "for (const auto x : items.x) over |= x > high;",
            "value",
        ),
        ("if (!(items.x[e] <= high) && high == high)", "if (!(items.x[e] <= high))", "value"),
    ),
    ("sample_tree", "walk.cuh"): (
        ("  __syncthreads();\n", "", "value"),
        ("__reduce_min_sync", "__reduce_max_sync", "value"),
    ),
    ("verify_tree", "walk.cu"): (
        ("  __syncthreads();\n", "", "schedule"),
        ("lane + half * kWarp > last && parents", "lane + half * kWarp != last && parents", "value"),
    ),
    ("sample_tree", "walk.cu"): (
        ("if (length == lane + half * kWarp)", "if (length == lane)", "value"),
        (
            "lane < p.splits ? p.parts[node * p.splits + lane] : Choice{kNoOrder, kNoId, 0}",
            "p.parts[node * p.splits + lane]",
            "value",
        ),
    ),
    ("sample_tree", "sample_tree.cu"): (
        ("if (p.lead == e.lead) {", "if (true) {", "value"),
        ("depth < p.levels", "depth <= p.levels", "address"),
        ("positive_ |= p > 0;", "positive_ = true;", "value"),
        ("p < kInfinity && e > 0)", "e > 0)", "value"),
        ("__fdiv_rn(p, e)", "p * (1 / e)", "value"),
    ),
    ("rank_tree", "rank_tree.cu"): (
        ("  __syncthreads();\n  if (warp == 0) choose_groups", "  if (warp == 0) choose_groups", "value"),
        ("above < 0 || above >= candidate", "above < 0 || above > candidate", "value"),
        ("min(ties_before, picks - all_above)", "ties_before", "value"),
        ("reach <= kMaxPicks; reach *= 2", "reach < kWarp; reach *= 2", "value"),
        ("i < p.candidates ? s.orders[i] : kNoOrder", "s.orders[min(i, kMaxDeviceCandidates - 1)]", "value"),
    ),
    ("select_visual", "select_visual.cu"): (
        ("buffer ^= 1", "buffer ^= 0", "thread"),
        ("> 0x7f800000u", ">= 0x7f800000u", "value"),
        ("  if (bits == 0x80000000u) bits = 0;\n", "", "value"),
        ("threshold.ties - above}", "threshold.ties}", "value"),
        ("if (first + j * lanes < tensor.words) word[j] = from", "word[j] = from", "address"),
    ),
    ("attention_entropy", "attention_entropy.cu"): (
        ("head / p.groups * p.k_head", "head % p.groups * p.k_head", "value"),
        ("first + r < p.n ? q", "first + r <= p.n ? q", "address"),
        ("key + P::key(c) > row + P::row(r)", "key + P::key(c) >= row + P::row(r)", "value"),
        ("t * kEntropyKeys + j < keys ?", "t * kEntropyKeys + j <= keys ?", "address"),
    ),
    ("attention_mass", "attention_mass.cu"): (
        ("next = weight_of_lane(t + 1);", "next = weight_of_lane(t);", "value"),
        ("w < kWarps; ++w", "w < kWarps - 1; ++w", "value"),
        ("<= tile_key) return;", "<= tile_key + 1) return;", "value"),
        ("sees > 0 && s < p.splits", "sees > 0 && s < 1", "value"),
        ("first + j < p.keys ?", "first + j <= p.keys ?", "address"),
    ),
    ("tree_attention", "attention_mma.cuh"): (
        ("copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "value"),
        ("total += weight * sum[from];", "total += sum[from];", "value"),
        ("    __syncthreads();  // the tile is there for all; the stage of the tile before is free\n", "", "value"),
        ("return r < count ? k + r * p.k_row : nullptr;", "return r <= count ? k + r * p.k_row : nullptr;", "address"),
        ("free = stage == 0 ? kStages - 1 : stage - 1;", "free = stage;", "value"),
        ("return __syncthreads_or(odd);", "return __any_sync(kAllLanes, odd);", "value"),
        ("      if (odd) running", "      if (odd && p.padding) running", "value"),
        ("p.padding ? shown + stage * kTile : nullptr", "p.padding ? shown : nullptr", "value"),
    ),
    ("tree_attention", "attention_core.cuh"): (
        ("- p.window + 1, 0, length)", "- p.window, 0, length)", "value"),
        ("const float weight = exp2_fast(share.x - high);", "const float weight = 1.f;", "value"),
        ("between(p.lengths[batch], 0, p.slots - p.tree)", "between(p.lengths[batch], 0, p.slots)", "value"),
    ),
    ("cross_attention", "attention_core.cuh"): (("d < half ? -to_float", "d < half ? to_float", "value"),),
    ("attention_entropy", "score_patch.cuh"): (
        ("load(t, t % Stages)", "load(t, 0)", "value"),
        ("u = (u + delta * z) * shrink;", "u = u * shrink;", "value"),
        ("step < Lanes; step *= 2)", "step * 2 < Lanes; step *= 2)", "value"),
    ),
    ("tree_attention", "tile.cuh"): (
        (
            "(lane / 16 * 8 + lane % 8) * kPitch<D> + lane / 8 % 2 * 8",
            "(lane / 8 % 2 * 8 + lane % 8) * kPitch<D> + lane / 16 * 8",
            "value",
        ),
    ),
    ("tree_attention", "tree_attention.cu"): (
        ("    __syncthreads();  // keys, values and weights are free\n", "", "value"),
    ),
}
PLANTED = tuple(Planted(*where, *fault) for where, faults in PLANTED_BY_FILE.items() for fault in faults)

# Synchronisations that nobody misses: FILE:TEXT OF THE LINE -> why it stays. One that is missed after all is an error.
UNMISSED: dict[str, str] = {}
