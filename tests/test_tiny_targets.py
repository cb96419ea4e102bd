"""The tiny targets of every family: they run, they depend on what the family sees, and batches agree with singles."""

from __future__ import annotations

import functools

import pytest
import tiny_inputs
import torch
from tiny_inputs import BY_ROW, batch, cases, prompt
from tiny_targets import EOS, FAMILIES, IMAGE, PAD, WINDOW, build

SEEING = [name for name, family in FAMILIES.items() if family.sees]
WINDOWED = {
    "mistral_window": {"sliding_window": None},
    "qwen2_window": {"use_sliding_window": False},
    "gemma3": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 4096},
}  # and the overrides that take the window away
families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def target(family: str, **overrides):
    return build(family, **overrides)


@torch.no_grad()
def last(model, inputs: dict) -> torch.Tensor:
    """The logits after the last token, (rows, V)."""
    return model(**inputs).logits[:, -1]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@families
def test_every_case_decodes(family):
    """Catches wrong numbers of placeholders, inputs that generate refuses, flat logits, and texts that end at once."""
    model = target(family)
    assert not model.training and model.generation_config.eos_token_id == EOS
    texts = []
    for case in cases(family):
        inputs = prompt(family, model, case)
        length = inputs["input_ids"].shape[1]
        logits = last(model, inputs)
        said = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, length:].tolist()
        assert logits.std() > 0.7, "chances must not be flat"
        assert said[0] == logits.argmax(), "the first token follows from the prefill"
        texts.append(said)
    assert len({tuple(text) for text in texts}) == len(texts) and sum(map(len, texts)) > 4 * len(texts)


@families
@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 90])
def test_long_prompts_are_as_long_as_asked(family, length):
    """Catches a begin token that is not counted: the exact lengths around a window are what such prompts are for."""
    assert prompt(family, target(family), "long", length=length)["attention_mask"].shape == (1, length)


@pytest.mark.parametrize("family", SEEING)
def test_every_picture_and_frame_is_seen(family):
    """Catches pixels that reach nothing: a test on such a target could not see a picture lost or exchanged."""
    model = target(family)
    for case in [c for c in cases(family) if c.startswith(("image", "video"))]:
        inputs = prompt(family, model, case)
        seen = last(model, inputs)
        (name,) = (n for n in inputs if n.startswith("pixel_values"))
        along = int(
            family in BY_ROW or (case == "video" and inputs[name].ndim == 5)
        )  # tiles, frames; else pictures, patches
        for part in (0, -1):
            pixels = inputs[name].clone()
            pixels.select(along, part).neg_()
            assert apart(last(model, {**inputs, name: pixels}), seen) > 1e-3, (case, part)


@families
def test_the_order_of_words_matters(family):
    """Catches attention without positions or so flat that the last token alone decides."""
    model = target(family)
    inputs = prompt(family, model, "text")
    ids = inputs["input_ids"].clone()
    ids[0, [2, 3]] = ids[0, [3, 2]]
    assert apart(last(model, {**inputs, "input_ids": ids}), last(model, inputs)) > 1e-2


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_begins_to_act_where_it_should(family):
    """Catches a window that is lost or off by one: with and without it the logits part at W + 1 tokens, not before."""
    model, without = target(family), target(family, **WINDOWED[family])
    for length in range(WINDOW - 2, WINDOW + 3):
        inputs = prompt(family, model, "long", length=length)
        distance = apart(last(model, inputs), last(without, inputs))
        assert distance < 1e-5 if length <= WINDOW else distance > 1e-3, length


@families
def test_how_far_back_a_target_sees(family):
    """Catches a window that some layer ignores, or that all layers have where one should see everything."""
    model = target(family)
    steps = model.config.get_text_config().num_hidden_layers * (WINDOW - 1)
    inputs = prompt(family, model, "long", length=steps + 2)
    seen = last(model, inputs)
    for position, visible in ((0, FAMILIES[family].sees_all), (1, True)):
        ids = inputs["input_ids"].clone()
        ids[0, position] += 7
        distance = apart(last(model, {**inputs, "input_ids": ids}), seen)
        assert distance > 1e-6 if visible else distance == 0, position


@pytest.mark.parametrize("family", ["gemma3", "pixtral", "mistral3", "llava_onevision", "qwen2_5_vl"])
def test_the_picture_crosses_the_window(family):
    """Catches a picture that lies in or out of the window whole, at the prefill and at the first new token, and a
    window that the overrides do not reach."""
    mixed = {"use_sliding_window": True, "max_window_layers": 1} if family in ("llava_onevision", "qwen2_5_vl") else {}
    model = target(family, sliding_window=WINDOW, **mixed)
    inputs = prompt(family, model, "image_window")
    ids = inputs["input_ids"][0]
    spots = (ids == IMAGE).nonzero().flatten()
    assert spots[0] < WINDOW <= spots[-1]
    assert spots[0] <= len(ids) - WINDOW < spots[-1]
    without = target(family, **WINDOWED.get(family, {}))
    assert apart(last(model, inputs), last(without, inputs)) > 1e-2


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_token_types_matter(family):
    """Catches token types that are all zero or left out where these families silently go on without them."""
    model = target(family)
    inputs = prompt(family, model, "images")
    bare = {name: tensor for name, tensor in inputs.items() if not name.endswith("token_type_ids")}
    assert len(bare) == len(inputs) - 1
    assert apart(last(model, bare), last(model, inputs)) > 1e-2


@families
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_agree_with_singles(family, side):
    """Catches tensors merged in the wrong order or shape, lost padding, and rows that see each other."""
    model = target(family)
    rows = [c for c in reversed(cases(family)) if c != "long"] + [("long", WINDOW + 1), cases(family)[-1]]
    inputs = batch(family, model, rows, side=side)
    used = inputs["attention_mask"].bool()
    assert (inputs["input_ids"][~used] == PAD).all() and not used.all()
    if side == "left":  # generate derives the positions from the padding
        options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        logits = model.generate(**inputs, **options).logits[0]
    else:
        with torch.no_grad():
            logits = model(**inputs).logits[torch.arange(len(rows)), used.sum(1) - 1]
    for i, row in enumerate(rows):
        case, length = (row, None) if isinstance(row, str) else row
        single = prompt(family, model, case, seed=i, length=length)
        assert torch.equal(inputs["input_ids"][i][used[i]], single["input_ids"][0])
        assert apart(logits[i], last(model, single)[0]) < 1e-4, row


@families
def test_the_seed_decides_everything(family):
    """Catches a draw from torch's global generator, and a seed or a case that does not reach the draws."""
    torch.manual_seed(5)
    again = build(family).state_dict()
    ours = target(family).state_dict()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    other = build(family, seed=1).state_dict()
    assert all(not torch.equal(ours[n], other[n]) for n in ours if n.endswith(("proj.weight", "norm.weight")))
    case = cases(family)[-1]
    first, second = (prompt(family, target(family), case) for _ in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
    changed = prompt(family, target(family), case, seed=1)
    for name in ("input_ids", *(n for n in first if n.startswith("pixel_values"))):
        assert not torch.equal(first[name], changed[name]), name


@families
def test_eager_attention_and_bf16(family):
    """Catches weights that depend on the implementation or dtype, and pixels that keep the wrong dtype."""
    model = target(family)
    case = "image" if "image" in cases(family) else "text"
    inputs = prompt(family, model, case)
    assert apart(last(build(family, attention="eager"), inputs), last(model, inputs)) < 1e-4
    half = build(family, dtype=torch.bfloat16)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), half.parameters()))
    inputs = prompt(family, half, case)
    assert all(inputs[name].dtype == torch.bfloat16 for name in inputs if name == "pixel_values")
    assert last(half, inputs).isfinite().all()


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision", "idefics3"])
def test_pixels_are_laid_out_as_by_the_image_processor(family):
    """Catches crops, tiles, fillers and counts that differ from what the real image processor hands to the model."""
    from PIL import Image
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    model = target(family)
    ours = batch(family, model, ["images", "text", "image"])
    if family == "idefics3":
        processor = Idefics3ImageProcessorPil(do_resize=False, max_image_size={"longest_edge": 32})
        sizes = [[(64, 32), (32, 32), (64, 32)], [], [(64, 32)]]
    else:
        kind = LlavaNextImageProcessorPil if family == "llava_next" else LlavaOnevisionImageProcessorPil
        square = {"height": 28, "width": 28}
        side = {"shortest_edge": 28} if family == "llava_next" else square
        processor = kind(size=side, crop_size=square, image_grid_pinpoints=model.config.image_grid_pinpoints)
        sizes = [[(56, 56), (30, 56), (50, 28)], [], [(56, 56)]]
    pictures = [[Image.new("RGB", size, (9, 90, 200)) for size in row] for row in sizes]
    theirs = processor(pictures, return_tensors="pt")
    assert set(theirs) == ours.keys() - {"input_ids", "attention_mask"}
    for name in theirs.keys() - {"pixel_values"}:
        assert torch.equal(ours[name], theirs[name].to(ours[name].dtype)), name
    assert ours["pixel_values"].shape == theirs["pixel_values"].shape
    fillers = [(x["pixel_values"] == 0).flatten(2).all(2) for x in (ours, theirs)]
    assert torch.equal(*fillers)


def test_refusals():
    """Catches a wrong word that builds something else in silence."""
    model = target("llama")
    with pytest.raises(ValueError, match="family: wanted one of"):
        build("gpt")
    with pytest.raises(ValueError, match="llama takes text"):
        prompt("llama", model, "image")
    with pytest.raises(ValueError, match="gemma3 takes"):
        prompt("gemma3", target("gemma3"), "video")
    with pytest.raises(ValueError, match="length"):
        prompt("llama", model, "text", length=4)
    with pytest.raises(ValueError, match="length"):
        prompt("llama", model, "long", length=0)
    with pytest.raises(ValueError, match="left"):
        batch("llama", model, ["text"], side="middle")
    with pytest.raises(ValueError, match="sliding window"):
        prompt("llava", target("llava"), "image_window")
    assert tiny_inputs.PICTURES.keys() == set(SEEING)
