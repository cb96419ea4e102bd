"""Targets at their true sizes: on `meta`, where nothing is allocated, and one of them in memory, by command only."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import full_size
import pytest
import torch
from full_targets import TARGETS, smolvlm_2b
from memory import CLEAR, peak_of
from oracle import oracle_drafts
from PIL import Image
from table import BEGIN, END
from tiny import build_llava, random_drafter, randomize
from transformers import AutoModelForImageTextToText, Idefics3ImageProcessorPil
from transformers.initialization import no_init_weights

from dream_ext import Decoder, TreeShape, decode
from dream_ext.cache import buffers
from dream_ext.drafter import Drafter
from dream_ext.parting import Judge, first_difference
from dream_ext.rounds import Rounds

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
BY_NAME = {target.name: target for target in TARGETS}


@pytest.fixture(scope="module")
def rows():
    """What `python bench/full_size.py` finds."""
    return {row["target"]: row for row in full_size.run(full_size.parse([]))}


@pytest.mark.parametrize(("name", "published"), [(t.name, p) for t in TARGETS for p in t.published])
def test_parameters_are_those_published(name, published, rows):
    """A size copied wrongly, a head tied where the checkpoint's is not, a tower with a part that it does not have."""
    difference = abs(rows[name]["parameters"][published.part] - published.parameters)
    assert difference <= published.rounding, published.source


@pytest.mark.parametrize(
    ("name", "fusion", "count"),
    [
        ("LLaVA-v1.6-Vicuna-7B", "none", 607_150_338),
        ("LLaVA-v1.6-Vicuna-13B", "none", 951_613_698),
        ("LLaVA-v1.6-Vicuna-7B", "concat", 640_708_866),
        ("LLaVA-v1.6-Vicuna-13B", "concat", 1_004_047_618),
    ],
)
def test_drafters_made_for_the_papers_targets_have_their_size(name, fusion, count, rows):
    """`DrafterConfig.for_target` that takes a size from the wrong place, a default that is not concat."""
    assert rows[name]["drafter_parameters"][fusion] == count


@pytest.mark.parametrize("name", BY_NAME)
def test_adapter_accepts(name):
    """A family in the table whose real configuration is refused: a window, a rotary kind, a head of another size."""
    model = full_size.build(BY_NAME[name], torch.bfloat16)
    adapter, text = full_size.reach(model), model.config.get_text_config()
    assert (adapter.hidden_size, adapter.vocab_size) == (text.hidden_size, text.vocab_size)
    assert len(adapter.layers) == len(adapter.layer_types) == text.num_hidden_layers
    assert model.config.image_token_id in adapter.visual_ids and model.config.image_token_id in adapter.placeholder_ids


@pytest.mark.parametrize("length", [3000, full_size.LONG])
@pytest.mark.parametrize("name", BY_NAME)
def test_caches_are_what_the_configuration_says(name, length, rows):
    """Keys and values of query heads instead of key heads, one of the two forgotten, a window that is not dropped."""
    text, found = BY_NAME[name].config().get_text_config(), rows[name]["at"][length]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    position = 2 * 2 * text.num_key_value_heads * head_dim  # keys and values, two bytes each, of one layer
    layers = text.num_hidden_layers
    sliding = (getattr(text, "layer_types", None) or []).count("sliding_attention")
    kept = min(length, text.sliding_window - 1) if sliding else 0  # what the next token's window still reaches
    assert found["kv"] == layers * length * position
    assert found["kv_sliding"] == ((layers - sliding) * length + sliding * kept) * position
    assert found["drafter_kv"] == 3 * length * position
    nodes = full_size.SHAPE.nodes
    beside = nodes * (8 + 2 * (text.vocab_size + text.hidden_size))
    assert found["tree"] == nodes * layers * position + beside == nodes * layers * position + found["tree_beside_kv"]


def test_gemma_alone_has_windows(rows):
    """Sliding layers counted in a family without, or not counted in Gemma."""
    saved = {name for name, row in rows.items() if row["at"][3000]["kv_sliding"] < row["at"][3000]["kv"]}
    assert saved == {"Gemma3-12B"}


def test_held_buffers_are_those_of_a_real_call(monkeypatch):
    """A rule of growth or of rounding that the page has and decoding has not."""
    model, inputs = build_llava()
    drafter, length, new = random_drafter(model, fusion="concat"), inputs["input_ids"].shape[1], 12
    held = {}

    def record(self, prefill, drafter, kind, original=Rounds._allocate):
        original(self, prefill, drafter, kind)
        held["target"] = full_size.nbytes(buffers(prefill.cache)) + full_size.nbytes(buffers(self.cache))
        held["device"] = full_size.nbytes(self.drafts.buffers)

    monkeypatch.setattr(decode, "on_cuda", lambda device: True)
    monkeypatch.setattr(Rounds, "_allocate", record)
    decoder = Decoder(model, drafter, tree=full_size.SHAPE, visual_ratio=1.0)
    decoder.generate(**inputs, do_sample=False, max_new_tokens=new + 1)  # the first comes from the prompt
    with full_size.META:
        twin = type(model)(model.config).eval()
        like = Drafter(drafter.config)
    setting = full_size.Setting(torch.float32, 1, new, device="cpu")
    found = full_size.caches(full_size.reach(twin), like, setting, length)
    assert found["kv_held"] == held["target"]
    assert found["drafter_kv_held"] - full_size.draft_bytes(like, length)[1] == held["device"]


def test_sum_and_cards(rows):
    """Drafter or buffers left out of the sum, a card named that is too small, GiB taken for GB."""
    for row in rows.values():
        for found in row["at"].values():
            parts = found["kv_held"] + found["drafter_kv_held"] + found["tree_beside_kv"]
            assert found["sum"] == row["weights"] + row["drafter_weights"] + parts
            assert found["fits_gb"] == full_size.fitting(found["sum"])
    for size, cards in ((24, [24, 80, 141]), (25, [80, 141]), (81, [141]), (142, [])):
        assert full_size.fitting(size * 10**9) == cards


def test_page_shows_what_the_program_says(rows):
    """A table that was typed, or that a change of the package made wrong: run `python bench/full_size.py --page`."""
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()
    assert shown == full_size.render(list(rows.values()))


@pytest.mark.parametrize("words", [["--batch", "0"], ["--prompt-tokens", "0"], ["--dtype", "int8"]])
def test_wrong_options_are_refused(words, capsys):
    """A size of zero that makes a table of nonsense."""
    with pytest.raises(SystemExit):
        full_size.parse(words)
    assert words[0] in capsys.readouterr().err


def test_batch_and_dtype_scale():
    """A batch that is forgotten in a part of the sum, bytes of another dtype."""
    target = BY_NAME["SmolVLM-2B"]
    one, two = (
        full_size.measure(target, full_size.Setting(dtype, batch, 128), [3000])
        for dtype, batch in ((torch.bfloat16, 1), (torch.float32, 2))
    )
    assert one["drafter_weights"] * 2 == two["drafter_weights"]
    bits = full_size.SHAPE.nodes * 8
    for part in ("kv", "kv_sliding", "kv_held", "drafter_kv", "drafter_kv_held"):
        assert one["at"][3000][part] * 4 == two["at"][3000][part]
    for part in ("tree", "tree_beside_kv"):
        assert (one["at"][3000][part] - bits) * 4 == two["at"][3000][part] - 2 * bits


FAKE, IMAGE, END_OF_LINE, LETTERS = 49152, 49153, 198, range(1000, 40000)
PICTURE = (1024, 768)  # a photograph of 4 : 3 becomes 12 tiles of 384 x 384 and one of the whole
NEW, RESUMED = 8, 24


def smolvlm():
    """SmolVLM-2B with random weights in bf16, logits of O(1) spread.

    What layers add to the text's state is scaled down with their number, as in GPT-2's initialisation. Otherwise
    rounding grows from layer to layer: two forwards of transformers alone, of one token and of several, then differ by
    0.05 in a logit, and at every fourth token they choose differently.
    """
    with no_init_weights():
        model = AutoModelForImageTextToText.from_config(smolvlm_2b(), dtype=torch.bfloat16)
    randomize(model)
    layers = model.get_decoder().layers
    with torch.no_grad():
        for weight in (w for layer in layers for w in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)):
            weight.mul_((2 * len(layers)) ** -0.5)
    model.generation_config.pad_token_id = 2
    return model


def smolvlm_prompt() -> dict[str, torch.Tensor]:
    """A picture cut by the real image processor, and a question of random words.

    The ids are laid out as by Idefics3's processor: every tile behind a marker of its place, a new line after each row
    of tiles, the whole picture last. A marker is one id here (the tokenizer makes several).
    """
    generator = torch.Generator().manual_seed(1)
    words = lambda n: torch.randint(LETTERS.start, LETTERS.stop, (n,), generator=generator).tolist()  # noqa: E731
    noise = torch.randint(0, 256, (12, 16, 3), generator=generator, dtype=torch.uint8).numpy()
    picture = Image.fromarray(noise).resize(PICTURE, Image.Resampling.BICUBIC)
    cut = Idefics3ImageProcessorPil(size={"longest_edge": 1536}, max_image_size={"longest_edge": 384})
    tiles = cut(images=[[picture]], return_tensors="pt", return_row_col_info=True)
    config = smolvlm_2b()
    side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
    tile = [IMAGE] * side**2
    ids = words(3)
    for _ in range(tiles["rows"][0][0]):
        for _ in range(tiles["cols"][0][0]):
            ids += [FAKE, *words(1), *tile]
        ids.append(END_OF_LINE)
    ids += [END_OF_LINE, FAKE, *words(1), *tile, FAKE, *words(24)]
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "pixel_values": tiles["pixel_values"].to(torch.bfloat16),
        "pixel_attention_mask": tiles["pixel_attention_mask"],
    }


def free_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def check(target, inputs, plain, ours, options) -> str:
    """How two answers compare; an error where rounding does not explain a difference."""
    parting = Judge(target).explain(inputs, plain, ours, options=options, temperature=0, seed=0)
    if parting is None:
        return "identical"
    assert parting.near_tie, parting
    return f"near tie at token {parting.index}, gap {parting.gap:.3f} of at most {parting.bound:.3f}"


def apart(one, other, length: int) -> float:
    """The largest relative difference, over layers, of the key or value of one of the first ``length`` positions.

    Rounding makes it some hundredths; a position that holds another token's row differs by about the root of two.
    """
    worst = 0.0
    for a, b in zip(one.layers, other.layers, strict=True):
        for name in ("keys", "values"):
            ours, theirs = (getattr(layer, name)[0, :, :length].float() for layer in (a, b))
            worst = max(worst, float(((ours - theirs).norm(dim=(0, 2)) / theirs.norm(dim=(0, 2))).max()))
    return worst


def timed(what: str, call):
    """The result of a call; prints its time by the clock and of the processor, and the peak of resident memory."""
    begin, work = time.perf_counter(), time.process_time()
    result, peak = peak_of(call)
    spent, work = time.perf_counter() - begin, time.process_time() - work
    print(f"{what}: {spent:.0f} s, {work:.0f} s of CPU, peak {peak / 1e9:.2f} GB", flush=True)
    return result


@pytest.mark.full_size
@pytest.mark.skipif(os.environ.get("DREAM_FULL_SIZE") != "1", reason="takes minutes and 8 GB: run `make full`")
def test_smolvlm_2b_decodes_as_the_target_alone(monkeypatch):
    """What no tiny model shows: a buffer, a mask or a copy that only breaks at real widths, depths and prompts; a tile
    or a visual token that is lost on the way through the tower."""
    assert os.access(CLEAR, os.W_OK), "needs Linux: /proc/self/clear_refs"
    assert free_bytes() > 8e9, f"needs 8 GB of memory, {free_bytes() / 1e9:.1f} GB are free"
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    target, inputs = timed("building", smolvlm), smolvlm_prompt()
    drafter = random_drafter(target)
    decoder = Decoder(target, drafter, tree=TreeShape(4, 6, 32))
    length = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
    plain = timed("target.generate", lambda: target.generate(**inputs, **options))
    ours = timed("decoder.generate", lambda: decoder.generate(**inputs, **options))
    stats = decoder.stats
    print(f"prompt {length}, visual {stats.visual_tokens}, read {stats.visual_kept}, {stats.rounds} rounds")
    assert stats.prompt_tokens == length and stats.visual_tokens == int((inputs["input_ids"] == IMAGE).sum())
    assert 0 < stats.visual_kept < stats.visual_tokens
    answers = [answer.sequences[0, length:].tolist() for answer in (plain, ours)]
    print(check(target, inputs, *answers, options), flush=True)
    _check_resumed(monkeypatch, target, decoder, ours, {**options, "max_new_tokens": RESUMED})


def _check_resumed(monkeypatch, target, decoder, first, options) -> None:
    """Go on behind an answer, with trees that hold pieces of the truth, so that paths of many lengths are kept."""
    text = first.sequences
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    plain = timed("target resumed", lambda: target.generate(**inputs, **options, past_key_values=caches[0]))
    truth = plain.sequences[0].tolist()
    with oracle_drafts(monkeypatch, truth, vocab=LETTERS.stop):
        call = lambda: decoder.generate(**inputs, **options, past_key_values=first.past_key_values)  # noqa: E731
        ours = timed("decoder resumed", call)
    start, stats = text.shape[1], decoder.stats
    answers = [answer.sequences[0, start:].tolist() for answer in (plain, ours)]
    print(check(target, inputs, *answers, {**options, "past_key_values": caches[1]}))
    print(f"{stats.rounds} rounds, accepted by depth {stats.accepted_per_depth}", flush=True)
    parted = first_difference(*answers)  # behind it the trees hold a text that is not written any more
    same = start + (len(answers[0]) if parted is None else parted) - 1  # the last common token was not forwarded
    print(f"keys and values differ by {apart(ours.past_key_values, plain.past_key_values, same):.3f}", flush=True)
    assert apart(ours.past_key_values, plain.past_key_values, same) < 0.25
    assert parted is not None or stats.rounds < RESUMED - 1, "no drafted token was accepted"
