"""Two package roots and the compiled module; everything else is in pyproject.toml."""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=find_packages(".", include=["dream_ext", "dream_ext.*"])
    + find_namespace_packages("python", include=["dream_make", "dream_make.*"]),
    package_dir={"dream_ext": "dream_ext", "dream_make": "python/dream_make"},
    cmake_source_dir=".",
)
