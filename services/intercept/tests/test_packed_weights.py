"""Products with weights of 4 and of 8 bits: CUDA's packing, and the numbers of the CPU."""

import pytest
import torch


def nibbles(n, k):
    """Weights from 0 to 15, and the same weights in bytes, as CUDA's packing takes them."""
    whole = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(n + k), dtype=torch.int32)
    return whole, (whole[:, ::2] << 4 | whole[:, 1::2]).to(torch.uint8)


def packed_by_hand(weight, tiles):
    """CUDA's packing, number by number: lane t holds columns t % 4 + {0, 4, 8, 12} (in bytes) of row t // 4."""
    n, steps = weight.shape[0], weight.shape[1] // (8 * tiles)
    rows = [[[[0] * (tiles // 2) for _ in range(32)] for _ in range(steps)] for _ in range(-(-n // 8))]
    for tile in range(len(rows)):
        for step in range(steps):
            for lane in range(32):
                for pair in range(tiles // 2):
                    row, first = 8 * tile + lane // 4, (step * tiles + 2 * pair) * 8 + lane % 4
                    values = [int(weight[row, first + 4 * i]) if row < n else 0 for i in range(4)]
                    word = sum([(v >> 4) << 4 * i | (v & 15) << 16 + 4 * i for i, v in enumerate(values)])
                    rows[tile][step][lane][pair] = word - (1 << 32) * (word >> 31)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(("n", "k", "tiles"), [(16, 64, 2), (8, 128, 4), (24, 256, 8), (20, 128, 4)])
def test_int4_weights_are_packed_as_cuda_packs_them(cuda, n, k, tiles):
    _, weight = nibbles(n, k)
    found = torch._convert_weight_to_int4pack(weight.to(cuda), tiles)
    assert found.is_cuda and torch.equal(found.cpu(), packed_by_hand(weight, tiles))


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "tiles"), [(1, 16, 64, 32, 2), (33, 48, 128, 64, 4), (5, 32, 256, 128, 8)]
)
def test_product_with_int4_weights_equals_cpu(cuda, m, n, k, group, tiles):
    whole, weight = nibbles(n, k)
    x, scales = torch.randn(m, k).bfloat16(), torch.rand(k // group, n, 2).bfloat16()
    packed = torch._convert_weight_to_int4pack(weight.to(cuda), tiles)
    found = torch._weight_int4pack_mm(x.to(cuda), packed, group, scales.to(cuda))
    on_host = torch._convert_weight_to_int4pack_for_cpu(whole, tiles)
    expected = torch._weight_int4pack_mm_for_cpu(x, on_host, group, scales)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=1e-3)  # one rounding to bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_product_with_int8_weights_equals_cpu(cuda, dtype):
    torch.manual_seed(0)
    x, scales = torch.randn(33, 128).to(dtype), torch.rand(64).to(dtype)
    weight = torch.randint(-128, 128, (64, 128), dtype=torch.int8)
    found = torch._weight_int8pack_mm(x.to(cuda), weight.to(cuda), scales.to(cuda))
    expected = torch._weight_int8pack_mm(x, weight, scales)
    torch.testing.assert_close(found.cpu(), expected, rtol=8 * torch.finfo(dtype).eps, atol=1e-3)


def call_int4(
    cuda, x=(4, 64), packed=(2, 2, 32, 1), group=32, scales=(2, 16, 2), dtype=torch.bfloat16, words=torch.int32
):
    arguments = torch.ones(x, dtype=dtype), torch.zeros(packed, dtype=words), torch.ones(scales, dtype=torch.bfloat16)
    x, packed, scales = [a.to(cuda) for a in arguments]
    return torch._weight_int4pack_mm(x, packed, group, scales)


@pytest.mark.parametrize(("wrong", "why"), [
    ({"x": (4, 96)}, "96 columns"), ({"x": (64,)}, "matrix"), ({"dtype": torch.float32}, "bfloat16"),
    ({"packed": (2, 2, 16, 1)}, "packed weight"), ({"packed": (2, 2, 32, 3)}, "packed weight"),
    ({"packed": (4, 32)}, "4 dimensions"),
    ({"words": torch.int64}, "int32"), ({"group": 16}, "qGroupSize"), ({"group": 0}, "qGroupSize"),
    ({"group": 128}, "qGroupSize"),
    ({"scales": (1, 16, 2)}, "qScaleAndZeros"), ({"packed": (2, 0, 32, 1), "x": (4, 0)}, "qGroupSize"),
])  # fmt: skip
def test_int4_product_refuses_bad_arguments(cuda, wrong, why):
    assert call_int4(cuda).shape == (4, 16)
    with pytest.raises(RuntimeError, match=why):
        call_int4(cuda, **wrong)


@pytest.mark.parametrize(("weight", "tiles", "why"), [
    (torch.zeros(16, 33, dtype=torch.uint8), 2, "multiple of 32"), (torch.zeros(16, 0, dtype=torch.uint8), 2, "multiple"),
    (torch.zeros(16, 32, dtype=torch.int32), 2, "uint8"), (torch.zeros(32, dtype=torch.uint8), 2, "matrix"),
    (torch.zeros(16, 32, dtype=torch.uint8), 3, "innerKTiles"), (torch.zeros(32, 16, dtype=torch.uint8).t(), 2, "contiguous"),
])  # fmt: skip
def test_int4_packing_refuses_bad_arguments(cuda, weight, tiles, why):
    with pytest.raises(RuntimeError, match=why):
        torch._convert_weight_to_int4pack(weight.to(cuda) if weight.is_contiguous() else weight.t().to(cuda).t(), tiles)


@pytest.mark.parametrize(("x", "weight", "scales", "why"), [
    (torch.ones(2, 8), torch.ones(4, 9, dtype=torch.int8), torch.ones(4), "columns"),
    (torch.ones(2, 8), torch.ones(4, 8, dtype=torch.uint8), torch.ones(4), "int8"),
    (torch.ones(2, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(3), "scales"),
    (torch.ones(2, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4).double(), "scales"),
    (torch.ones(2, 8).double(), torch.ones(4, 8, dtype=torch.int8), torch.ones(4), "self"),
])  # fmt: skip
def test_int8_product_refuses_bad_arguments(cuda, x, weight, scales, why):
    with pytest.raises(RuntimeError, match=why):
        torch._weight_int8pack_mm(x.to(cuda), weight.to(cuda), scales.to(cuda))
    with pytest.raises(RuntimeError, match="same device"):
        torch._weight_int8pack_mm(
            torch.ones(2, 8, device=cuda), torch.ones(4, 8, dtype=torch.int8), torch.ones(4, device=cuda)
        )


def test_operators_of_the_cpus_packing_are_refused(cuda):
    with pytest.raises(NotImplementedError, match="_dyn_quant_matmul_4bit"):
        torch._dyn_quant_matmul_4bit(
            torch.ones(2, 32, device=cuda), torch.zeros(64, dtype=torch.uint8, device=cuda), 32, 32, 4
        )
    with pytest.raises(NotImplementedError, match="_convert_weight_to_int4pack_for_cpu"):
        torch._convert_weight_to_int4pack_for_cpu(torch.zeros(16, 64, dtype=torch.int32, device=cuda), 2)
