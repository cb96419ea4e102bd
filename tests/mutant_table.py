"""Known bugs of speculative decoding as replacements in the source, and the tests that must catch each; see
`mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A piece of a file that is there exactly once, and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One bug: its name, its edits, and pytest's names of the tests that catch it."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, (Edit(f"dream_ext/{file}", old, new),), tests)


LOSSLESS = "tests/test_lossless.py"
SAMPLED = f"{LOSSLESS}::test_same_text_as_generate"
CACHE = f"{LOSSLESS}::test_cache_equals_a_rebuilt_one"
ROWS = "tests/test_context.py::test_rows_are_the_targets_own_features"
DRAFTER = "tests/exact/test_exact_drafter.py"
PADDING = f"{LOSSLESS}::test_left_padding"
BATCH = "tests/test_batch.py"
EXACT = "tests/exact/test_exact_families.py"
WINDOW = "tests/test_tree_windows.py::test_a_window_that_ends_inside_the_tree"

MUTANTS = (
    # What is said
    mutant(
        "raw-softmax bonus", "sampling.py",
        "        node = None if emitter.done else tree.child(node, token)\n",
        "        child = None if emitter.done else tree.child(node, token)\n"
        "        if child is None and emitter.choose is not greedy:\n"
        "            emitter.input_ids[0, -1] = torch.multinomial(torch.softmax(logits[node].float(), -1), 1)\n"
        "        node = child\n",
        f"{SAMPLED}[cpu-llama-t07_top_p]",
    ),
    mutant(
        "raw softmax on a device", "device_decode.py",
        "scores = emitter.processors(ids, rounds.logits.float().flatten(0, 1)).unflatten(0, (batch, nodes))",
        "scores = rounds.logits.float()",
        f"{SAMPLED}[device-llama-t07_top_p]",
    ),
    mutant(
        "penalty sees the prefix one token short", "sampling.py",
        "        scores = self.processors(self.input_ids, raw)\n",
        "        scores = self.processors(self.input_ids[:, :-1], raw)\n",
        f"{LOSSLESS}::test_custom_processor_sees_the_true_prefix[cpu]",
    ),
    mutant(
        "penalty sees the root's prefix", "device_decode.py",
        "emitter.silent and all(type(p) in OF_LOGITS for p in emitter.processors)", "emitter.silent",
        *(f"{SAMPLED}[device-{family}-t13_top_k_penalty]" for family in ("llama", "llava", "two_pictures")),
        f"{BATCH}::test_a_batch_is_the_batch_of_the_target[sampled penalty-left]",
    ),
    mutant(
        "logits of the root for every node", "sampling.py",
        "token = emitter.emit(logits[node])", "token = emitter.emit(logits[0])",
        f"{SAMPLED}[cpu-llama-repetition]",
    ),
    mutant(
        "bonus of the last node that was drafted", "sampling.py",
        "*(tokens[node] for node in nodes[1:]), bonus]",
        "*(tokens[node] for node in nodes[1:]), int(logits[-1].argmax())]",
        f"{SAMPLED}[cpu-llama-greedy]",
    ),
    mutant(
        "processed scores returned as logits", "sampling.py",
        "self.logits += (raw,)", "self.logits += (scores,)",
        f"{LOSSLESS}::test_scores_and_logits",
    ),
    # Noise
    mutant(
        "noise row used twice", "noise.py",
        "behind = self._ahead.popleft()[1]", "behind = self._ahead[0][1]",
        "tests/test_accept.py::test_foreseen_choices_use_their_noise_and_move_the_generator",
    ),
    mutant(
        "one noise row for a whole round", "noise.py",
        "self._ahead[at + step][0][row]", "self._ahead[at][0][row]",
        f"{SAMPLED}[device-llama-t1]",
    ),
    mutant(
        "foreseen noise after a foreign draw", "noise.py",
        "if not self._ahead or not _same(states, self._states):", "if not self._ahead:",
        "tests/test_accept.py::test_two_samplers_share_a_generator",
    ),
    mutant(
        "generator not moved", "noise.py",
        "        torch.set_rng_state(state)", "        pass",
        f"{SAMPLED}[cpu-llama-t1]",
    ),
    # Stops
    mutant(
        "EOS inside a round ignored", "sampling.py",
        "        emitter.append(torch.tensor([token], device=emitter.input_ids.device))\n        if emitter.done:\n",
        "        emitter.append(torch.tensor([token], device=emitter.input_ids.device))\n        if False:\n",
        f"{SAMPLED}[cpu-llama-eos_list]",
    ),
    mutant(
        "EOS inside a round ignored where processors are", "sampling.py",
        "        node = None if emitter.done else tree.child(node, token)\n",
        "        node = tree.child(node, token)\n",
        f"{SAMPLED}[cpu-llama-min_new]",
    ),
    mutant(
        "EOS inside a round ignored on a device", "device_decode.py",
        "            if ragged.emitter.done:\n                return\n", "",
        f"{SAMPLED}[device-llama-eos_list]",
    ),
    # Masks and positions
    mutant(
        "siblings see each other in the target", "verify.py",
        "sees = (behind < 0) | (ancestor & (behind < tree.nodes))",
        "sees = (behind < 0) | ((ancestor | (behind <= torch.arange(tree.nodes, device=device)[:, None]))"
        " & (behind < tree.nodes))",
        f"{LOSSLESS}::test_other_attention_and_dtypes[cpu]",
    ),
    mutant(
        "siblings see each other in the operator", "verify.py",
        "TreePlans(adapter.windows, prefix.lengths, tree.ancestors,",
        "TreePlans(adapter.windows, prefix.lengths, (2 << torch.arange(tree.nodes)).sub(1).expand_as(tree.ancestors),",
        f"{SAMPLED}[cpu-llama-greedy]",
    ),
    mutant(
        "siblings see each other in the drafter", "draft_state.py",
        "self._attention(ancestors, self.length))", "self._attention(torch.ones_like(ancestors), self.length))",
        "tests/test_drafter.py::test_unrolled_training_equals_cached_drafting_on_a_tree",
    ),
    mutant(
        "slot used as rotary position", "decode.py",
        "(roots[0], prefill.position), prefill", "(roots[0], torch.tensor([kv.length(cache)])), prefill",
        f"{PADDING}[cpu]",
    ),
    mutant(
        "slot used as rotary position on a device", "rounds.py",
        "        self.position.copy_(prefill.position)\n", "        self.position.fill_(kv.length(prefill.cache))\n",
        f"{PADDING}[device]",
    ),
    mutant(
        "rotary position used as slot", "decode.py",
        "start, path = kv.length(cache), []", "start, path = int(position), []",
        f"{PADDING}[cpu]",
    ),
    mutant(
        "rotary position used as slot on a device", "rounds.py",
        "self.slots.copy_(self.length[:, None] + torch", "self.slots.copy_(self.position[:, None] + torch",
        f"{PADDING}[device]",
    ),
    mutant(
        "rotary position of a node by index", "verify.py",
        "(tree.depth + position[..., None])", "(torch.arange(tree.nodes) + position[..., None])",
        f"{SAMPLED}[cpu-llama-greedy]",
    ),
    mutant(
        "padding seen by the nodes", "verify.py",
        "padding = None if sees.all() else", "padding = None if True else",
        f"{PADDING}[cpu]",
    ),
    # The target's cache
    mutant(
        "cache one too long", "cache.py",
        "layer._set_length(start + path.numel())", "layer._set_length(start + path.numel() + 1)",
        f"{CACHE}[cpu-max_new]",
    ),
    mutant(
        "cache one too long at the end", "decode.py",
        "                kv.keep(cache, start, kept)\n",
        "                kv.keep(cache, start, kept)\n"
        "                if emitter.done:\n                    [x._set_length(x.length + 1) for x in cache.layers]\n",
        f"{CACHE}[cpu-eos]",
    ),
    mutant(
        "accepted nodes not moved together", "cache.py",
        "        keep_path(buffers(cache), start, path)\n", "        pass\n",
        f"{CACHE}[cpu-max_new]",
    ),
    mutant(
        "values not moved with the keys", "cache.py",
        "for buffer in (layer.key_buffer, layer.value_buffer)]", "for buffer in (layer.key_buffer,)]",
        f"{CACHE}[cpu-max_new]",
    ),
    # What the drafter reads
    mutant(
        "features one slot early", "context.py",
        "shifted = torch.cat([self.last_feature, features[:-1]])", "shifted = features",
        f"{ROWS}[layers0-0.75]",
    ),
    Mutant(
        "features at the wrong tokens, by speed",
        (
            Edit(
                "dream_ext/context.py",
                "shifted = torch.cat([self.last_feature, features[:-1]])", "shifted = features",
            ),
            Edit(
                "dream_ext/context.py",
                "self._queue(self.adapter.embed(ids)[0], features, at)",
                "self._queue(self.adapter.embed(ids)[0], features.roll(-1, 0), at)",
            ),
        ),
        (f"{DRAFTER}::test_a_trained_drafter_is_believed",),
    ),
    mutant(
        "features of the first nodes instead of the path's", "context.py",
        "accepted = features[path.to(features.device)]", "accepted = features[: path.numel()]",
        f"{ROWS}[layers0-0.75]",
    ),
    mutant(
        "drafted features left in the drafter's cache", "draft_state.py",
        '        """Forget the drafted slots."""\n        self.drafted = 0\n',
        '        """Forget the drafted slots."""\n        self.length, self.drafted = self.length + self.drafted, 0\n',
        f"{DRAFTER}::test_the_drafters_state_equals_a_rebuilt_one",
    ),
    mutant(
        "rotary positions of accepted rows one late", "context.py",
        "[position + 1 + step for step in range(len(tokens))], accepted",
        "[position + 2 + step for step in range(len(tokens))], accepted",
        f"{ROWS}[layers0-0.75]",
    ),
    mutant(
        "last token read twice when resumed", "prefill.py",
        "        contexts[0].rewind_last()\n", "",
        "tests/test_context.py::test_a_resumed_call_goes_on_reading",
    ),
    mutant(
        "pruned pictures keep no positions", "context.py",
        "self._queue(embeds[rows], shifted[rows], positions[rows])",
        "self._queue(embeds[rows], shifted[rows], positions[: len(rows)])",
        f"{ROWS}[layers0-0.75]",
    ),
    # Windows
    mutant(
        "window off by one in the mask", "verify.py",
        "(place > depth[:, :, None] - window)", "(place >= depth[:, :, None] - window)",
        WINDOW,
    ),
    mutant(
        "window of the nodes off by one in the operator", "targets/attention.py",
        "near = depth[..., None, :] > depth[..., :, None] - window",
        "near = depth[..., None, :] >= depth[..., :, None] - window",
        WINDOW,
    ),
    mutant(
        "window by slot in the mask", "verify.py",
        "place = torch.where(behind < 0, behind, below)", "place = behind",
        WINDOW,
    ),
    mutant(
        "window by index in the operator", "targets/attention.py",
        'behind = {"depth": self._depth, "window": window}',
        'behind = {"depth": torch.arange(self._tree).expand_as(self._depth).contiguous(), "window": window}',
        WINDOW,
    ),
    mutant(
        "window forgotten in the operator", "targets/attention.py",
        "            if window is not None:\n                ancestors = ",
        "            if False:\n                ancestors = ",
        WINDOW,
    ),
    # M-RoPE
    mutant(
        "stale rope deltas", "prefill.py",
        "if start and delta is not None:", "if False:",
        "tests/test_mrope.py::test_a_second_turn_after_somebody_elses_call[qwen2_5_vl]",
    ),
    mutant(
        "slot used as rotary position with M-RoPE", "targets/adapter.py",
        "        return after[-3:].expand(3, -1).clone()", "        return torch.full((3, 1), length)",
        f"{EXACT}::test_a_prompt_decodes[qwen2_5_vl]",
    ),
    # Batches
    mutant(
        "padding of a batch seen by its rows", "rounds.py",
        "            self.hidden[:, : padding.shape[1]] = padding\n", "            pass\n",
        f"{BATCH}::test_a_batch_is_the_batch_of_the_target[greedy-left]",
    ),
    mutant(
        "padding of another row", "rounds.py",
        "            self.hidden[:, : padding.shape[1]] = padding\n",
        "            self.hidden[:, : padding.shape[1]] = padding[:1]\n",
        f"{BATCH}::test_a_batch_is_the_batch_of_the_target[greedy-left]",
    ),
    mutant(
        "first row's position for every row", "rounds.py",
        "        self.position.copy_(prefill.position)\n", "        self.position.copy_(prefill.position[..., :1])\n",
        f"{BATCH}::test_a_batch_is_the_batch_of_the_target[greedy-left]",
    ),
    mutant(
        "first row's noise for every row", "noise.py",
        "self._ahead[at + step][0][row]", "self._ahead[at + step][0][0]",
        f"{BATCH}::test_a_batch_is_the_batch_of_the_target[sampled-left]",
    ),
    mutant(
        "penalty sees another row's text", "ragged.py",
        "scores = self._processors[row](self._text(row), raw)", "scores = self._processors[row](self._text(0), raw)",
        f"{BATCH}::test_a_batch_is_the_batch_of_the_target[penalty-left]",
    ),
    mutant(
        "a finished row's own tokens forwarded as padding", "device_decode.py",
        "if not ragged.wants(row) or ragged.padded(row) != padded:", "if not ragged.wants(row):",
        f"{EXACT}::test_padding_behind_an_end",
    ),
)  # fmt: skip
