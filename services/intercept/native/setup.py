"""Builds the native kernels for the PyTorch and the Python that run this file.

The module uses PyTorch's C++ API, which has no stable ABI. So a wheel fits one release of PyTorch: the wheel requires that
release, and `wooly_native/_built.py` names it, because `wooly` asks before it loads the module. It also has the digest of the
sources.
"""

import runpy
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).parent
BUILD = str(torch.__version__)  # with its build, such as +cpu: other builds may have other flags

PACKAGE = HERE / "wooly_native"
SOURCES = runpy.run_path(str(PACKAGE / "_sources.py"))["digest"](PACKAGE)

(PACKAGE / "_built.py").write_text(
    '"""The release of PyTorch for which the module was built, and its sources. Written by setup.py."""\n\n'
    f'TORCH = "{BUILD}"\nSOURCES = "{SOURCES}"\n'
)

setup(
    version=(HERE.parents[2] / "VERSION").read_text().strip(),
    install_requires=[f"torch=={BUILD.partition('+')[0]}"],
    ext_modules=[
        CppExtension(
            "wooly_native._native",
            ["src/fields.cpp", "src/kernel.cpp"],
            depends=["src/fields.h", "src/recording.h", "src/signature.h"],
            extra_compile_args=["-O2", "-fno-plt", "-Wall", "-Wextra", "-Wno-missing-field-initializers"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
