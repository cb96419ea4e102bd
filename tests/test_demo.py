"""The demo target: its vision tower, its assembly, its training data and its installation (no network; the model
itself only if installed)."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from dream_make.lora import SCALE, LoraLinear, add_lora
from PIL import Image
from tiny import narrow_llama

from dream_ext import demo, demo_build
from dream_ext.targets.efficientnet_lite import BATCH_NORM_EPS, STAGES, SameConv, convert_state
from dream_ext.targets.efficientnet_lite import EfficientNetLite0 as Tower
from dream_ext.targets.efficientnet_lite import EfficientNetLite0Config as TowerConfig
from dream_ext.targets.hashing import hash_folder

needs_demo = pytest.mark.skipif(
    not demo.is_installed(), reason="the demo model is not installed (dream-ext demo --install)"
)
needs_adapter = pytest.mark.skipif(not demo.adapter_path().is_file(), reason="no adapter in this tree")


def source_state(generator):
    """A random state in the layout of the published checkpoint."""
    state = {}

    def conv(name, out, wide, kernel):
        state[name + ".weight"] = torch.randn(out, wide, kernel, kernel, generator=generator) / (wide * kernel) ** 0.5

    def norm(name, size):
        state[name + ".weight"], state[name + ".bias"] = (
            torch.rand(size, generator=generator) + 0.5,
            torch.randn(size, generator=generator),
        )
        state[name + ".running_mean"] = torch.randn(size, generator=generator)
        state[name + ".running_var"] = torch.rand(size, generator=generator) * 0.01
        state[name + ".num_batches_tracked"] = torch.tensor(1)

    conv("_conv_stem", 32, 3, 3)
    norm("_bn0", 32)
    channels, index = 32, 0
    for repeats, kernel, _, expansion, out in STAGES:
        for _ in range(repeats):
            block, wide = f"_blocks.{index}.", channels * expansion
            if expansion > 1:
                conv(block + "_expand_conv", wide, channels, 1)
                norm(block + "_bn0", wide)
            conv(block + "_depthwise_conv", wide, 1, kernel)
            norm(block + "_bn1", wide)
            conv(block + "_project_conv", out, wide, 1)
            norm(block + "_bn2", out)
            channels, index = out, index + 1
    conv("_conv_head", 1280, 320, 1)
    norm("_bn1", 1280)
    return state


def test_folded_stem_and_first_block_equal_convolution_and_batch_norm():
    """Catches a wrong epsilon, scale or shift in the folding, which would still give plausible features."""
    state = source_state(torch.Generator().manual_seed(0))
    tower = Tower(TowerConfig()).eval()
    tower.load_state_dict(convert_state(state))
    x = torch.randn(1, 3, 64, 64)

    def norm(y, name):
        parts = [state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(y, *parts, training=False, eps=BATCH_NORM_EPS)

    y = F.relu6(norm(F.conv2d(F.pad(x, (0, 1, 0, 1)), state["_conv_stem.weight"], stride=2), "_bn0"))
    block = "_blocks.0."
    wanted = F.relu6(norm(F.conv2d(y, state[block + "_depthwise_conv.weight"], padding=1, groups=32), block + "_bn1"))
    wanted = norm(F.conv2d(wanted, state[block + "_project_conv.weight"]), block + "_bn2")
    with torch.no_grad():
        found = tower.blocks[0](F.relu6(tower.stem(x)))
    assert torch.allclose(found, wanted, atol=1e-3 * wanted.abs().max().item())


def test_unknown_tensors_in_the_checkpoint_are_refused():
    """Catches a converter that drops weights it does not know, such as squeeze-and-excitation."""
    state = source_state(torch.Generator().manual_seed(0))
    state["_blocks.3._se_reduce.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match="_se_reduce"):
        convert_state(state)


def test_same_padding_puts_the_odd_pixel_right_and_below():
    """Catches symmetric padding, which shifts every strided layer by half a pixel."""
    conv = SameConv(1, 1, 3, 2)
    torch.nn.init.ones_(conv.weight)
    torch.nn.init.zeros_(conv.bias)
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 0, 0] = 1
    assert conv(x)[0, 0].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    x = torch.ones(1, 1, 4, 4)
    assert conv(x)[0, 0].tolist() == [[9.0, 6.0], [6.0, 4.0]]


def test_tower_gives_one_token_for_each_32_pixels():
    """Catches a tower whose tokens do not match the placeholders the processor writes."""
    tower = Tower(TowerConfig()).eval()
    with torch.no_grad():
        out = tower(torch.randn(2, 3, 96, 64), output_hidden_states=True)
    assert out.hidden_states[-1].shape == (2, 6, 1280)


def test_merged_adapter_equals_the_adapter_in_training():
    """Catches a wrong scale, a swapped A and B, or a wrong weight name at assembly."""
    model = narrow_llama()
    language = {name: tensor.bfloat16().float() for name, tensor in model.model.state_dict().items()}
    model.model.load_state_dict(language)
    adapters = add_lora(model, 4)
    with torch.no_grad():
        for tensor in adapters.values():
            tensor.copy_(0.1 * torch.randn(tensor.shape))
    ids = torch.randint(0, 300, (1, 9))
    with torch.no_grad():
        wanted = model.model(ids).last_hidden_state
    merged = demo_build.merge_adapter(language, {"lora." + name: tensor.detach() for name, tensor in adapters.items()})
    plain = narrow_llama()
    with torch.no_grad():
        before = plain.model(ids).last_hidden_state
        plain.model.load_state_dict(merged)
        found = plain.model(ids).last_hidden_state
    assert torch.allclose(found, wanted, atol=1e-5)
    assert not torch.allclose(before, wanted, atol=1e-2)
    assert demo_build.LORA_SCALE == SCALE


def test_adapter_of_another_model_is_refused():
    """Catches a silent merge of an adapter that does not fit."""
    language = narrow_llama().model.state_dict()
    adapter = {"lora.layers.0.mlp.up_proj.A": torch.zeros(2, 16), "lora.layers.0.mlp.up_proj.B": torch.zeros(48, 2)}
    with pytest.raises(ValueError, match=r"does not fit.*up_proj"):
        demo_build.merge_adapter(language, adapter)


def test_new_adapters_change_nothing():
    """Catches a LoRA that starts away from zero."""
    base = torch.nn.Linear(8, 5)
    x = torch.randn(3, 8)
    assert torch.equal(LoraLinear(base, 2)(x), base(x))


def render(messages, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([messages], chat_template=demo_build.CHAT_TEMPLATE, **options)
    return rendered[0][0] if isinstance(rendered[0], list) else rendered[0]


def test_chat_template_matches_the_training_layout():
    """Catches a template whose tokens differ from those the adapters were trained on, with and without a picture."""
    content = [{"type": "image"}, {"type": "text", "text": "Describe it."}]
    picture = render([{"role": "user", "content": content}], add_generation_prompt=True)
    assert picture == "<|im_start|>user\n<image>\nDescribe it.<|im_end|>\n<|im_start|>assistant\n"
    plain = render(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}], add_generation_prompt=False
    )
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DREAM_EXT_CACHE", str(tmp_path / "cache"))
    adapter = tmp_path / "adapter.safetensors"
    adapter.write_bytes(b"adapter")
    monkeypatch.setattr(demo, "adapter_path", lambda: adapter)
    return tmp_path


def test_missing_model_is_said_in_one_line(empty_cache):
    """Catches a traceback from deep inside transformers in place of the command that mends it."""
    for load in (demo.load_target, demo.load_processor):
        with pytest.raises(
            FileNotFoundError, match=r"^the demo model is not installed: run `dream-ext demo --install`$"
        ):
            load()
    assert not demo.is_installed() and demo.pictures() == []


def fake_download(monkeypatch, content):
    def run(command, **_):
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "thing-1-py3-none-any.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("thing/data.bin"), content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)


def test_package_with_another_hash_is_refused(empty_cache, monkeypatch):
    """Catches unpacking of a file that is not the pinned one."""
    fake_download(monkeypatch, b"evil")
    work = empty_cache / "work"
    work.mkdir()
    wheel = demo.Wheel("thing==1", "0" * 64, {"thing/data.bin": "data.bin"})
    with pytest.raises(RuntimeError, match="refusing"):
        demo.fetch(wheel, work)
    assert not (work / "data.bin").exists()


def test_pinned_package_is_unpacked(empty_cache, monkeypatch):
    """Catches a check that refuses everything."""
    fake_download(monkeypatch, b"good")
    work = empty_cache / "work"
    work.mkdir()
    probe = empty_cache / "probe"
    probe.mkdir()
    demo.subprocess.run(["pip", "-d", str(probe)])
    digest = demo.file_sha256(next(probe.glob("*.whl")))
    demo.fetch(demo.Wheel("thing==1", digest, {"thing/data.bin": "deep/data.bin"}), work)
    assert (work / "deep" / "data.bin").read_bytes() == b"good"


def test_failed_installation_leaves_nothing_behind(empty_cache, monkeypatch):
    """Catches a half-written target that later counts as installed."""
    monkeypatch.setattr(demo, "fetch", lambda wheel, work: (work / "pictures").mkdir(exist_ok=True))
    monkeypatch.setattr(demo_build, "check_requirements", lambda: None)

    def broken(gguf, checkpoint, adapter, out):
        out.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(demo_build, "assemble", broken)
    with pytest.raises(OSError, match="disk full"):
        demo.install(progress=False)
    assert not demo.is_installed() and list(demo.cache_dir().iterdir()) == []


def test_installation_is_idempotent_and_keyed_by_the_adapter(empty_cache, monkeypatch):
    """Catches a second download, and an old target that survives a new adapter."""
    built = []

    def fetch(wheel, work):
        (work / "pictures").mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(work / "pictures" / "a.png")

    monkeypatch.setattr(demo, "fetch", fetch)
    monkeypatch.setattr(demo_build, "check_requirements", lambda: None)
    monkeypatch.setattr(demo_build, "assemble", lambda gguf, checkpoint, adapter, out: (out.mkdir(), built.append(out)))
    first = demo.install(progress=False)
    assert demo.install(progress=False) == first and len(built) == 1 and demo.is_installed()
    assert [path.name for path in demo.pictures()] == ["a.png"]
    demo.adapter_path().write_bytes(b"another adapter")
    assert not demo.is_installed() and demo.install(progress=False) != first and len(built) == 2


def test_folder_hash_sees_weights_and_names(tmp_path):
    """Catches a hash that ignores a shard or its name."""
    with pytest.raises(FileNotFoundError):
        hash_folder(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"1")
    first = hash_folder(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"")
    second = hash_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert len({first, second}) == 2 and hash_folder(tmp_path) == second


@needs_adapter
def test_shipped_adapter_is_the_one_in_its_provenance():
    """Catches an adapter that was replaced without its record."""
    note = json.loads((demo.ASSETS / "target" / "provenance.json").read_text())
    assert note["adapter_sha256"] == demo.file_sha256(demo.adapter_path())
    assert all(row["terms"] for row in note["sources"])
    assert demo.adapter_path().stat().st_size < 20e6


@needs_demo
def test_installed_target_answers_from_the_picture():
    """Catches placeholders that do not reach the model: another picture must give another answer."""
    model, processor = demo.load_target(torch.float32), demo.load_processor()
    answers = []
    for path in demo.pictures()[:2]:
        content = [
            {"type": "image", "image": Image.open(path).convert("RGB")},
            {"type": "text", "text": "Describe this picture."},
        ]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        assert (inputs["input_ids"] == demo_build.IMAGE_TOKEN_ID).sum() == 196
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(ids, skip_special_tokens=True))
    assert answers[0] != answers[1] and all(answers)
