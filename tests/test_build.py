"""The compiled module: free of torch and of a dynamic CUDA runtime, loadable anywhere, and buildable from an sdist."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dream_ext
from dream_ext import build_info

ROOT = Path(__file__).parents[1]
built = pytest.mark.skipif(not build_info.describe()["loaded"], reason="dream_ext._C is not built")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")


def test_sources_know_no_torch():
    """Catches an include of torch, which costs minutes of compile time and ties the wheel to one torch."""
    for path in (ROOT / "csrc").rglob("*.*"):
        found = re.findall(r'#include\s*[<"](?:torch|ATen|c10)[^>"]*', path.read_text())
        assert not found, f"{path.name}: {found}"
    assert "Torch" not in re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text())


@built
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_links_neither_torch_nor_the_cuda_runtime():
    """Catches libcudart.so or libcuda.so among the needed libraries: import would fail on a machine without a GPU."""
    text = subprocess.run(["readelf", "-d", build_info.describe()["file"]], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", text.stdout)
    assert needed and not [n for n in needed if re.match(r"lib(torch|c10|cuda|cudart|nvrtc)", n)], needed
    assert "RPATH" not in text.stdout and "RUNPATH" not in text.stdout
    if build_info.describe()["openmp"] and "GNU" in build_info.describe()["compiler"]:
        assert "libgomp.so.1" in needed  # by soname, so that torch's own copy answers


@built
def test_one_openmp_runtime_in_the_process():
    """Catches a second thread pool: torch is imported first and its libgomp serves the operators."""
    code = (
        "import dream_ext.ops as ops, torch; torch.set_num_threads(2)\n"
        "ops.attention_entropy(torch.zeros(4, 64, 8), torch.zeros(4, 64, 8), 1.0)\n"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l or 'libomp' in l}))"
    )
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    run = python(code)
    assert run.stdout.strip() == "1", run.stdout + run.stderr


@built
def test_imports_with_no_gpu_in_sight():
    """Catches CUDA work at import time."""
    run = python("from dream_ext import build_info; print(build_info.describe()['loaded'])", CUDA_VISIBLE_DEVICES="")
    assert run.stdout.strip() == "True", run.stderr


def test_imports_without_the_compiled_module():
    """Catches an import that fails where nothing is built, and an operator that silently becomes its reference."""
    code = (
        "import sys; sys.modules['dream_ext._C'] = None\n"
        "import torch, dream_ext.ops as ops\n"
        "from dream_ext import build_info; assert not build_info.describe()['loaded']\n"
        "try: ops.expand_tree(torch.zeros(1, 3), torch.zeros(1), 1)\n"
        "except RuntimeError as error: print(error)"
    )
    run = python(code)
    line = run.stdout.strip()
    assert line.startswith("expand_tree: ") and "pip install ." in line and "\n" not in line, run.stdout + run.stderr


@built
def test_versions_agree():
    """Catches a module left over from another version."""
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M).group(1)
    assert dream_ext.__version__ == declared == build_info.describe()["version"]


def test_facts_are_complete():
    facts = build_info.describe()
    if facts["loaded"]:
        assert facts["isa"] in ("base", "avx2", "avx512", "avx512vnni")
        assert isinstance(facts["cuda_architectures"], list)
        assert (facts["cuda_runtime"] is None) == (not facts["cuda"])
    else:
        assert facts["error"]


@pytest.mark.slow
def test_a_cuda_build_works_without_a_driver(tmp_path):
    """Catches kernels that do not compile for an architecture, and a module that wants a GPU: it loads and serves CPU
    tensors on a machine without a driver."""
    tools = Path(sys.executable).parent
    nvcc, cmake = shutil.which("nvcc"), shutil.which("cmake", path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    pybind11 = importlib.util.find_spec("pybind11")
    if nvcc is None or cmake is None or pybind11 is None:
        pytest.skip("needs nvcc, cmake and pybind11")
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    package, build = tmp_path / "dream_ext", tmp_path / "build"
    shutil.copytree(ROOT / "dream_ext", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    paths = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={Path(pybind11.origin).parent}/share/cmake/pybind11",
    ]
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment["PATH"]) else []
    for command in (
        [cmake, *generator, "-S", ROOT, "-B", build, "-DDREAM_CUDA=ON", *paths],
        [cmake, "--build", build],
    ):
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    shutil.copy(next(build.glob("_C*.so")), package)
    facts = (
        "from dream_ext.build_info import describe as d; print(d()['file'], d()['cuda'], *d()['cuda_architectures'])"
    )
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'bench'}", "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run([sys.executable, "-c", facts], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert told.stdout.split() == [str(next(package.glob("_C*.so"))), "True", "80-real", "90-real", "90-virtual"], (
        told.stderr
    )
    suite = [ROOT / f"tests/ops/test_{name}.py" for name in ("keep_path", "rank_tree", "verify_tree", "tree_attention")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "pythonpath=",
        *map(str, suite),
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-2000:]


@pytest.mark.slow
def test_sdist_to_wheel(tmp_path):
    """Catches files missing from the sdist or the wheel; builds from the sdist alone, without CUDA."""
    needed = ("scikit_build_core", "pybind11", "setuptools")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing or shutil.which("c++") is None:
        pytest.skip(f"needs a C++ compiler and {', '.join(needed)}")
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "DREAM_CUDA": "OFF", "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    hook = "import sys; from scikit_build_core.setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"

    def build(what: str, source: Path) -> None:
        run = subprocess.run(
            [sys.executable, "-c", hook, what, str(tmp_path)],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]

    tree = tmp_path / "tree"
    skipped = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=skipped)
    build("build_sdist", tree)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    source = next((tmp_path / "unpacked").iterdir())
    assert (source / "csrc/include/dream/expand_tree.h").exists() and not list(source.rglob("*.so"))
    build("build_wheel", source)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert [n for n in names if re.match(r"dream_ext/_C\..*\.so", n)]
    assets = [p.relative_to(ROOT).as_posix() for p in (ROOT / "dream_ext/assets").rglob("*.*")]
    modules = [p.relative_to(ROOT).as_posix() for p in (ROOT / "dream_ext").rglob("*.py")]
    workshop = [p.relative_to(ROOT / "python").as_posix() for p in (ROOT / "python/dream_make").rglob("*.py")]
    left_out = {name for name in assets + modules + workshop if "__pycache__" not in name} - set(names)
    assert not left_out, sorted(left_out)
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"dream_ext", "dream_make"}, tops
