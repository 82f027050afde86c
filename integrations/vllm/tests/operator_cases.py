"""Calls operators of vLLM on "cuda", and prints their results as JSON. `test_operators.py` runs it as a process.

Arguments: endpoint, session id and token of an executor.
"""

import json
import sys

import torch
from wooly import api
from wooly_vllm import operators

endpoint, session, token = sys.argv[1:4]
api.attach([endpoint], session, token)
api.install_facade()
operators.install()
given = torch.tensor([[0.0, 1.0, 5.0, 6.0]], device="cuda")
out = torch.empty(1, 2, device="cuda")
torch.ops._C.gelu_and_mul(out, given)
# 4 bits: all weights are 9, their zero point is 8, and their scale is 0.5
weights = torch.full((1, 8), 0x99999999 - (1 << 32), dtype=torch.int32, device="cuda")
zeros = torch.full((1, 1), 0x77777777, dtype=torch.int32, device="cuda")
scales = torch.full((1, 8), 0.5, device="cuda")
product = torch.ops._C.gptq_gemm(torch.ones(2, 8, device="cuda"), weights, zeros, scales, True, False, 4)
silu = torch.empty(1, 2, device="cuda")
torch.ops._C.silu_and_mul(silu, given)
print(json.dumps([t.tolist() for t in (out, product, silu)]))
