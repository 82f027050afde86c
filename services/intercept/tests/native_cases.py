"""Builds an extension library in C++ and calls it on "cuda". `test_extensions.py` runs this file as two kinds of process.

`build FOLDER` compiles the library, and writes a Python module that loads it. `call FOLDER ENDPOINT SESSION TOKEN` prints JSON.
"""

import json
import sys
from pathlib import Path

SOURCE = """
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

at::Tensor running_total(const at::Tensor& x) {
  auto y = x.contiguous();
  auto out = at::empty_like(y);
  const float* from = y.data_ptr<float>();
  float* to = out.data_ptr<float>();
  float total = 0;
  for (int64_t i = 0; i < y.numel(); ++i) to[i] = total += from[i];
  return out;
}

TORCH_LIBRARY(native_operators, m) { m.def("running_total(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(native_operators, CPU, m) { m.impl("running_total", running_total); }
"""
MODULE = """
import torch
__version__ = "3"
torch.ops.load_library({path!r})
torch.library.register_fake("native_operators::running_total", torch.empty_like)
"""
INLINE = "at::Tensor twice(const at::Tensor& x) { return x * 2; }"


def build(folder):
    from torch.utils import cpp_extension

    cpp_extension.load_inline(
        "native_operators_library",
        SOURCE,
        is_python_module=False,
        build_directory=folder,
        no_implicit_headers=True,
        extra_cflags=["-O0"],
    )
    path = str(Path(folder) / "native_operators_library.so")
    (Path(folder) / "native_operators.py").write_text(MODULE.format(path=path))


def call(folder, endpoint, session_id, token):
    import torch
    from torch.utils import cpp_extension
    from wooly import api

    api.attach([endpoint], session_id, token)
    api.install_facade()
    import native_operators  # noqa: F401 - it registers operators

    x = torch.arange(5.0, device="cuda")
    twice = cpp_extension.load_inline("native_inline", INLINE, functions=["twice"], build_directory=folder).twice
    found = {"native": torch.ops.native_operators.running_total(x).tolist()}
    found["inline"] = [twice(torch.ones(2)).tolist(), twice(x).tolist()]
    try:
        cpp_extension.load_inline(
            "native_cuda", INLINE, cuda_sources=INLINE, functions=["twice"], build_directory=folder
        )
    except Exception as e:
        found["cuda sources"] = f"{type(e).__name__}: {e}"
    api.disable()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    {"build": build, "call": call}[sys.argv[1]](*sys.argv[2:])
