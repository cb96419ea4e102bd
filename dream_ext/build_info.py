"""What the compiled module is made of, for the doctor, for benchmark records and for bug reports."""

from __future__ import annotations

from typing import Any

from dream_ext.ops._native import load_error, module

__all__ = ["describe"]


def _version(number: int) -> str | None:
    """13000 -> "13.0"; 0 -> None."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def describe() -> dict[str, Any]:
    """Facts about dream_ext._C: loaded, and, when it is, the rest.

    file, version, compiler; isa (instruction set in use: base, avx2, avx512) and best_isa; openmp (bool);
    tensor_border ("dlpack": through torch's exchange interface, "attributes": a torch older than that); cuda (bool),
    cuda_architectures (list of str), cuda_runtime ("13.0", linked statically) and cuda_driver (newest CUDA
    the driver runs), None where there is none. When it does not load: error, the first line of the import error.
    """
    if module is None:
        return {"loaded": False, "error": load_error}
    info = dict(module.build_info())
    info["loaded"] = True
    info["file"] = module.__file__
    info["cuda_architectures"] = info["cuda_architectures"].split()
    info["cuda_runtime"] = _version(info["cuda_runtime"])
    info["cuda_driver"] = _version(module.cuda_driver_version()) if info["cuda"] else None
    return info
