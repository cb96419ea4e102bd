"""The command line: every mistake is one line and status 2, help is quick, and the commands work on a tiny target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import build_llama, build_llava, random_drafter
from tiny_folder import save_pictures, save_target, use_as_demo

from dream_ext import cli
from dream_ext.drafter import Drafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, drafter, pictures) folders of one tiny LLaVA."""
    root = tmp_path_factory.mktemp("folders")
    random_drafter(build_llava()[0]).save_pretrained(root / "drafter")
    return save_target(root / "target"), root / "drafter", save_pictures(root / "pictures")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder and no hub: the demo is not installed, and nothing is fetched."""
    monkeypatch.setenv("DREAM_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def call(capsys):
    """Run the command in this process -> (status, stdout, stderr)."""

    def run(*words):
        status = cli.main([str(w) for w in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def refused(result, *words):
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("dream-ext: ") and err.count("\n") == 1 and "Traceback" not in err
    for word in words:
        assert word in err
    return err


def test_help_is_quick():
    """`--help` must not import torch or transformers: seconds on every use."""
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*[m for m in ('torch', 'transformers') if m in sys.modules]))\n"
        "from dream_ext import cli\n"
        "cli.main(['generate', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--prompt" in done.stdout and done.stdout.splitlines()[-1] == ""


def test_a_mistake_ends_the_process_with_2():
    """The exit status reaches the shell, and stderr holds one line."""
    words = [sys.executable, "-m", "dream_ext.cli", "generate", "--prompt", "x", "--image", "absent.png"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    refused((done.returncode, done.stdout, done.stderr), "absent.png")


@pytest.mark.parametrize(
    "words, said",
    [
        (["fly"], "fly"),
        ([], "generate"),
        (["generate"], "--prompt"),
        (["generate", "--prompt", "x", "--wings", "2"], "--wings"),
        (["generate", "--prompt", "x", "--max-new-tokens", "many"], "many"),
        (["generate", "--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "x", "--dtype", "int3"], "int3"),
        (["generate", "--prompt", "x", "--device", "abacus"], "abacus"),
        (["generate", "--prompt", "x", "--threads", "-1"], "threads"),
        (["generate", "--prompt", "x"], "dream-ext demo --install"),
        (["generate", "--prompt", "x", "--target", "./nowhere"], "nowhere"),
        (["demo"], "dream-ext demo --install"),
        (["bench"], "--json"),
        (["bench", "--json", "r.json", "--methods", "magic"], "magic"),
        (["bench", "--json", "no/such/folder/r.json"], "no/such/folder"),
        (["bench", "--json", "r.json", "--questions", "absent.txt"], "absent.txt"),
        (["bench", "--json", "r.json", "--pictures", "absent"], "absent"),
        (["bench", "--json", "r.json", "--prompts", "0"], "at least 1"),
        (["bench", "--json", "r.json", "--prompts", "2"], "dream-ext demo --install"),
    ],
)
def test_mistakes_are_one_line(call, words, said, tmp_path, monkeypatch):
    """A traceback, a usage text of twenty lines, or status 1."""
    monkeypatch.chdir(tmp_path)
    refused(call(*words), said)


def test_a_file_that_is_no_picture(call, tmp_path):
    """Text with a picture's name, a cut-off picture, a folder."""
    fake = tmp_path / "fake.png"
    fake.write_text("not a picture")
    refused(call("generate", "--prompt", "x", "--image", fake), "not a picture")
    whole = (save_pictures(tmp_path / "p") / "0.png").read_bytes()
    fake.write_bytes(whole[: len(whole) // 2])
    refused(call("generate", "--prompt", "x", "--image", fake), "not a picture")
    refused(call("generate", "--prompt", "x", "--image", tmp_path), "no such picture")


def test_wrong_models(call, folders, tmp_path):
    """A folder that is no target, an unknown model type, a missing drafter, another target's drafter."""
    target, drafter, _ = folders
    ask = ("generate", "--prompt", "w5", "--dtype", "float32")
    refused(call(*ask, "--target", tmp_path), "config.json")
    refused(call(*ask, "--target", target), "--drafter")
    refused(call(*ask, "--target", target, "--drafter", tmp_path / "absent"), "no such drafter")
    refused(call(*ask, "--target", target, "--drafter", target), "cannot load the drafter")
    other, _ = build_llava(seed=9)
    random_drafter(other).save_pretrained(tmp_path / "other")
    refused(call(*ask, "--target", target, "--drafter", tmp_path / "other"), "other weights")
    wide, _ = build_llama(hidden_size=32)
    random_drafter(wide).save_pretrained(tmp_path / "narrow")
    refused(call(*ask, "--target", target, "--drafter", tmp_path / "narrow"), "hidden size")
    strange = save_target(tmp_path / "strange")
    (strange / "config.json").write_text(json.dumps({"model_type": "perceptron9000"}))
    refused(call(*ask, "--target", strange, "--drafter", drafter), "perceptron9000")


def test_generate_says_what_plain_generate_says(call, folders):
    """Streamed and as JSON, with and without a picture, greedy and sampled."""
    from dream_ext import loading

    target, drafter, pictures = folders
    model = loading.load_target(str(target), torch.float32, torch.device("cpu"))
    processor = loading.load_processor(str(target))
    for image in (None, pictures / "0.png"):
        picture = None if image is None else loading.load_picture(image)
        inputs = loading.build_inputs(processor, "w5 w6 w7 w8", picture, torch.device("cpu"), torch.float32)
        for temperature in (0.0, 0.7):
            how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            torch.manual_seed(3)
            out = model.generate(**inputs, max_new_tokens=20, **how)
            want = loading.decode_text(processor, out[0, inputs["input_ids"].shape[1] :])
            ask = [
                "generate",
                "--target",
                target,
                "--drafter",
                drafter,
                "--prompt",
                "w5 w6 w7 w8",
                "--dtype",
                "float32",
            ]
            ask += ["--temperature", temperature, "--seed", 3, "--max-new-tokens", 20]
            ask += [] if image is None else ["--image", image]
            status, said, err = call(*ask)
            assert (status, said.strip(), err) == (0, want, "")
            status, said, _ = call(*ask, "--json")
            answer = json.loads(said)
            assert status == 0 and answer["text"] == want and answer["stats"]["new_tokens"] == 20


def test_picture_for_a_text_model(call, folders, tmp_path):
    """A picture must not be dropped in silence when the target cannot see."""
    model, _ = build_llama()
    model.save_pretrained(tmp_path / "text")
    target, drafter, pictures = folders
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "text" / name).write_bytes((target / name).read_bytes())
    ask = ("generate", "--prompt", "w5", "--target", tmp_path / "text", "--drafter", drafter)
    refused(call(*ask, "--image", pictures / "0.png"), "text only")


def test_bench_from_end_to_end(call, folders, tmp_path):
    """One file with everything, a table on stdout; resuming asks nothing again; a half file is not overwritten."""
    target, drafter, pictures = folders
    questions = tmp_path / "q.json"
    questions.write_text(json.dumps({"known": ["w5 w6", "w9"], "new": ["w7 w8"]}))
    file = tmp_path / "r.json"
    words = [
        "bench",
        "--json",
        file,
        "--target",
        target,
        "--drafter",
        drafter,
        "--pictures",
        pictures,
        "--questions",
        questions,
    ]
    words += ["--prompts", 3, "--max-new-tokens", 8, "--threads", 1]
    status, out, err = call(*words)
    assert status == 0, err
    assert "dream_blind" in out and "unexplained" not in out
    result = json.loads(file.read_text())
    assert result["complete"] and len(result["rows"]) == (7 + 9) + (2 + 3)  # bf16 and fp32, greedy and sampled
    assert str(tmp_path) not in file.read_text(), "a path of this machine got into the result"
    for name in (
        "cpu",
        "torch",
        "commit",
        "target_fingerprint",
        "drafter_sha256",
        "command",
        "date",
        "threads",
    ):
        assert name in result["meta"]
    assert result["summary"]["distinct_3"] > 0
    ways = result["meta"]["settings"]["ways"]
    for record in result["details"]:
        way = ways[record["method"]]
        assert record["packed"] == way["pack"] and (record["tree"] is None) == (way["tree"] is None)
    before = result["details"]
    assert call(*words, "--resume")[0] == 0
    assert json.loads(file.read_text())["details"] == before
    file.write_text(json.dumps({**result, "complete": False}))
    refused(call(*words), "--resume")
    refused(call(*words, "--resume", "--seed", 1), "cannot be resumed")
    file.write_text("hello")
    refused(call(*words), "no result")


def tamper(monkeypatch):
    """A decoder that changes one token: not what the target says."""
    from dream_ext.generate import Decoder

    honest = Decoder.generate

    def dishonest(self, **kwargs):
        out = honest(self, **kwargs).clone()
        out[0, -2] = (out[0, -2] + 1) % 150
        return out

    monkeypatch.setattr(Decoder, "generate", dishonest)


def test_demo_compares_both_answers(call, folders, monkeypatch):
    """Same text, both speeds, tau, and `identical: yes` only when it is true."""
    target, _, pictures = folders
    use_as_demo(monkeypatch, target, pictures)
    ask = ("demo", "--dtype", "float32", "--prompt", "w5 w6 w7", "--max-new-tokens", 16)
    status, out, err = call(*ask)
    assert status == 0, err
    assert "identical: yes (16 tokens, float32)" in out and "tau" in out and "tokens/s" in out
    status, out, _ = call(*ask, "--json", "--image", pictures / "1.png")
    result = json.loads(out)
    assert status == 0 and result["identical"] and result["parting"] is None
    assert result["plain"]["text"] == result["dream"]["text"] and result["tau"] >= 1
    tamper(monkeypatch)
    status, out, _ = call(*ask)
    assert status == 1 and "identical: no (first differing token 15" in out and "identical in fp32: no" in out


def test_demo_explains_a_bf16_parting(call, folders, monkeypatch):
    """In bf16 a parting is excused only when it is a near tie and fp32 answers are equal."""
    from dream_ext import duel, parting

    target, _, pictures = folders
    use_as_demo(monkeypatch, target, pictures)
    ask = ("demo", "--dtype", "bfloat16", "--prompt", "w5 w6 w7", "--max-new-tokens", 16)
    tamper(monkeypatch)
    assert call(*ask)[0] == 1
    monkeypatch.setattr(duel, "_equal_in_fp32", lambda *_: True)
    assert call(*ask)[0] == 1, "a wide gap was excused"
    monkeypatch.setattr(parting, "BF16_ULPS", 10**6)
    status, out, _ = call(*ask)
    assert status == 0 and "identical: no" in out and "identical in fp32: yes" in out


def test_doctor_json(call):
    """The report's schema: scripts read it; every problem carries its mend."""
    status, out, _ = call("doctor", "--json")
    facts = json.loads(out)
    assert set(facts) == {
        "versions", "machine", "driver_cuda", "tools", "torch", "built", "openmp", "demo", "trees", "problems", "ok",
    }  # fmt: skip
    assert facts["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    assert status == (0 if facts["ok"] else 1)
    assert facts["demo"]["installed"] is False
    assert any(p["mend"] == "dream-ext demo --install" for p in facts["problems"])
    assert all(set(p) == {"level", "what", "mend"} and p["mend"] for p in facts["problems"])
    assert {Path(name).name.split(".")[0] for name in facts["openmp"]} <= {"libgomp", "libomp", "libiomp5"} or facts[
        "openmp"
    ]


def test_doctor_for_people(call):
    """The table shows every fact and the mends."""
    _status, out, _ = call("doctor")
    assert "torch" in out and "mend: dream-ext demo --install" in out and out.rstrip().endswith("ready")


def test_doctor_names_what_is_missing(monkeypatch):
    """A missing package and a module that was not built are named with the command, not raised."""
    from dream_ext import doctor
    from dream_ext.ops import _native

    monkeypatch.setattr(_native, "module", None)
    monkeypatch.setattr(_native, "load_error", "gone")
    facts = doctor.examine()
    assert not facts["ok"] and any("_C" in p["what"] and "pip install ." in p["mend"] for p in facts["problems"])
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no_such_module"))
    facts = doctor.examine()
    assert not facts["ok"] and "no_such_module" in facts["problems"][0]["mend"]


def test_driver_older_than_the_build(monkeypatch):
    """A module built for a newer CUDA than the driver runs fails at the first kernel: say so before."""
    from dream_ext import build_info, doctor
    from dream_ext.ops import _native

    monkeypatch.setattr(_native, "module", object())
    monkeypatch.setattr(build_info, "describe", lambda: {"cuda_runtime": "13.0", "cuda_archs": ["80"]})
    monkeypatch.setattr(doctor, "driver_cuda", lambda: "12.8")
    problems = []
    doctor._built_facts(problems)
    assert len(problems) == 1 and "12.8" in problems[0]["what"] and "driver" in problems[0]["mend"]
    monkeypatch.setattr(doctor, "driver_cuda", lambda: "13.0")
    problems.clear()
    doctor._built_facts(problems)
    assert problems == []


def test_drafter_survives_the_folder(folders):
    """The drafter the command line loads is the one that was saved."""
    _, drafter, _ = folders
    again = Drafter.from_pretrained(drafter, dtype=torch.float32)
    want = random_drafter(build_llava()[0])
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), want.state_dict().values(), strict=True))
