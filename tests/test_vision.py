"""Visual token compression: scores equal eager attention's, the target is untouched, the choice of rows is right."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from tiny import IMAGE, build_llava, random_drafter
from tiny_inputs import prompt
from tiny_targets import build

from dream_ext import Decoder
from dream_ext.targets.adapter import TargetAdapter
from dream_ext.targets.attention import capture_attention
from dream_ext.vision import choose_rows, last_full_layer, picture_rows, watch_visual_mass

pytest.importorskip("dream_ext._C", reason="the compiled operators are not built")


def eager_mass(model, inputs, adapter, voters, columns):
    """Column sums of the last layer's attention over ``voters``, from eager attention weights."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(**inputs, output_attentions=True).attentions[len(adapter.layers) - 1][0]
    model.set_attn_implementation("sdpa")
    return attention[:, voters][:, :, columns].sum((0, 1))


@pytest.mark.parametrize("images", [1, 2])
def test_scores_are_the_attention_mass_of_the_text_after_each_picture(images):
    """Catches averaging over all rows, a wrong layer, votes of text before the picture, missing rotary positions."""
    model, inputs = build_llava(images=images)
    adapter = TargetAdapter(model)
    visual = adapter.visual_mask(inputs["input_ids"][0])
    with torch.no_grad(), watch_visual_mass(adapter) as mass:
        model(**inputs)
    got = mass.scores(visual)
    pictures = picture_rows(visual)
    assert len(pictures) == images
    every, want = torch.arange(len(visual)), []
    for picture in pictures:
        voters = every[(every > picture[-1]) & ~visual]
        want.append(eager_mass(model, inputs, adapter, voters, picture))
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)


def test_watching_changes_no_bit_and_ends_with_the_block():
    """Catches a swapped implementation or mask, and a watcher that outlives an exception."""
    model, inputs = build_llava()
    adapter = TargetAdapter(model)
    with torch.no_grad():
        before = model(**inputs).logits
        with capture_attention(adapter, [0, 2]) as seen:
            during = model(**inputs).logits
    assert torch.equal(before, during)
    length, heads = inputs["input_ids"].shape[1], adapter.text_config.num_attention_heads
    assert sorted(seen) == [0, 2]
    assert seen[2][0].shape == (1, heads, length, adapter.hidden_size // heads)
    kept = dict(seen)
    with pytest.raises(KeyError), capture_attention(adapter, [0]) as late:
        raise KeyError
    with torch.no_grad():
        model(**inputs)
    assert not late
    assert seen[0][0] is kept[0][0]


def test_eager_attention_is_watched_too():
    model, inputs = build_llava()
    model.set_attn_implementation("eager")
    adapter = TargetAdapter(model)
    visual = adapter.visual_mask(inputs["input_ids"][0])
    with torch.no_grad(), watch_visual_mass(adapter) as mass:
        model(**inputs)
    assert mass.scores(visual).sum() > 0


def test_other_models_and_threads_are_not_watched():
    """Catches state that is global: a second model, or the same one in another thread, must not overwrite the
    scores."""
    (model, inputs), (other, _) = build_llava(), build_llava(seed=5)
    adapter = TargetAdapter(model)

    def run_elsewhere():
        with torch.no_grad():
            model(**inputs)

    with torch.no_grad(), watch_visual_mass(adapter) as mass:
        other(**inputs)
        thread = threading.Thread(target=run_elsewhere)
        thread.start()
        thread.join()
    with pytest.raises(RuntimeError, match="no attention was recorded"):
        mass.scores(adapter.visual_mask(inputs["input_ids"][0]))


def test_without_text_behind_a_picture_later_rows_vote_and_else_all_are_kept():
    model, inputs = build_llava(images=0, text_len=0)
    ids = torch.cat([inputs["input_ids"][0], torch.tensor([IMAGE] * 4)])[None]
    pixels = torch.randn(1, 3, 28, 28)
    adapter = TargetAdapter(model)
    with torch.no_grad(), watch_visual_mass(adapter) as mass:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels)
    visual = adapter.visual_mask(ids[0])
    scores = mass.scores(visual)
    assert scores.isinf().all()
    assert choose_rows(scores, visual, 0.5).tolist() == list(range(ids.shape[1]))


def mask(text: str) -> torch.Tensor:
    return torch.tensor([c == "v" for c in text])


def test_rows_are_chosen_per_picture_in_order():
    """Catches one quota over all pictures, rounding down, sorting by score, and text rows that get lost."""
    visual = mask("tvvvvtvvvt")
    scores = torch.tensor([0.1, 0.9, 0.2, 0.8, 5.0, 7.0, 6.0])
    assert choose_rows(scores, visual, 0.5).tolist() == [0, 2, 4, 5, 7, 8, 9]
    assert choose_rows(None, visual, 0).tolist() == [0, 5, 9]
    assert choose_rows(None, visual, 1).tolist() == list(range(10))
    assert choose_rows(None, mask("tttt"), 0.3).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [1, 3, 4, 196, 576])
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.75, 0.9])
def test_the_quota_is_rounded_up(count, ratio):
    """Catches 0.1 * 30 = 3.0000000000000004 becoming 4, and an empty picture."""
    visual = torch.ones(count, dtype=torch.bool)
    exact = math.ceil(round(ratio * 100) * count / 100)
    assert len(choose_rows(torch.rand(count), visual, ratio)) == exact


def test_rows_of_a_picture_that_tokens_end_are_one_picture():
    """Catches a quota for every row of a Pixtral picture, two pictures taken for one, and one picture of one row."""
    ids = torch.tensor([1, 9, 9, 7, 9, 9, 8, 9, 9, 9, 7, 9, 9, 9, 8, 5])  # 9 a patch, 7 ends a row, 8 the last one
    pictures = picture_rows(ids == 9, ids)
    assert [picture.tolist() for picture in pictures] == [[1, 2, 4, 5], [7, 8, 9, 11, 12, 13]]
    single = torch.tensor([9, 9, 8, 9, 9, 8, 9])
    assert [picture.tolist() for picture in picture_rows(single == 9, single)] == [[0, 1], [3, 4], [6]]
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 9.0, 1.0, 1.0, 9.0, 9.0])
    assert choose_rows(scores, ids == 9, 0.5, pictures).tolist() == [0, 1, 2, 3, 6, 8, 10, 12, 13, 14, 15]


def pictures_in_lines(model) -> dict:
    """Three pictures with one token between them, as a line break makes them."""
    ids = torch.tensor([[1, 5, *[IMAGE] * 4, 7, *[IMAGE] * 4, 7, *[IMAGE] * 4, 8, 9]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(3, 3, 28, 28)}


@pytest.mark.parametrize("family", ["pixtral", "llava"])
def test_the_quota_of_a_whole_picture_reaches_the_drafter(family):
    """Catches a prefill that does not say which rows belong together, and one that says it to every family."""
    model = build(family)
    decoder = Decoder(model, random_drafter(model, visual_ratio=0.3))
    inputs = prompt(family, model, "images") if family == "pixtral" else pictures_in_lines(model)
    decoder.generate(**inputs, max_new_tokens=2)
    ids = inputs["input_ids"][0]
    pictures = picture_rows(ids == IMAGE, ids if family == "pixtral" else None)
    assert len(pictures) == 3
    assert decoder.stats.visual_kept == sum(math.ceil(0.3 * len(picture)) for picture in pictures)


def test_the_watched_layer_sees_everything():
    """Catches scores from a sliding layer, which knows nothing of a picture out of its window."""
    assert last_full_layer(TargetAdapter(build("gemma3"))) == 2
    model = build("pixtral", sliding_window=8)
    decoder = Decoder(model, random_drafter(model, visual_ratio=0.5))
    with pytest.raises(ValueError, match="window of 8"):
        decoder.generate(**prompt("pixtral", model, "image"), max_new_tokens=2)
    text = prompt("pixtral", model, "text")
    assert torch.equal(decoder.generate(**text, max_new_tokens=2), model.generate(**text, max_new_tokens=2))


def test_bad_ratios_and_scores_are_refused():
    with pytest.raises(ValueError, match="visual_ratio"):
        choose_rows(None, mask("v"), 1.5)
    with pytest.raises(ValueError, match="one score"):
        choose_rows(torch.rand(2), mask("vvv"), 0.5)
