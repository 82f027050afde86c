"""Saving, copying and loading: torch.save, pickle, deepcopy, safetensors, storages. Also with processes without Wooly."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from wooly import api
from wooly.read_ahead import TOGETHER


@pytest.fixture
def sample(cuda):
    t = torch.arange(6.0, device=cuda).reshape(2, 3)
    return {"whole": t, "row": t[1], "turned": t.T, "weight": nn.Parameter(t * 2), "host": torch.ones(2)}


def address(t):
    return t.untyped_storage().data_ptr()


LOCATIONS = {
    "none": (None, "cuda", "cpu"),
    "cpu": ("cpu", "cpu", "cpu"),
    "cuda": ("cuda", "cuda", "cuda"),
    "cuda:0": ("cuda:0", "cuda", "cuda"),
    "device cuda": (torch.device("cuda"), "cuda", "cuda"),
    "device cpu": (torch.device("cpu"), "cpu", "cpu"),
    "dict to host": ({"cuda:0": "cpu"}, "cpu", "cpu"),
    "dict from host": ({"cpu": "cuda:0"}, "cuda", "cuda"),
    "function that keeps": (lambda storage, location: storage, "cpu", "cpu"),
    "function that moves": (lambda storage, location: storage.cuda(0), "cuda", "cuda"),
    "function that declines": (lambda storage, location: None, "cuda", "cpu"),
    "meta": ("meta", "meta", "meta"),
}


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "any object"])
@pytest.mark.parametrize("location", LOCATIONS.values(), ids=LOCATIONS)
def test_load_uses_map_location(tmp_path, sample, location, weights_only, mmap):
    where, device, host = location
    torch.save(sample, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location=where, weights_only=weights_only, mmap=mmap)
    assert {k: v.device.type for k, v in loaded.items()} == {**dict.fromkeys(sample, device), "host": host}
    assert isinstance(loaded["weight"], nn.Parameter) and loaded["weight"].requires_grad
    assert loaded["turned"].stride() == (1, 3)
    if device != "meta":
        assert address(loaded["whole"]) == address(loaded["row"]) == address(loaded["turned"]) != address(sample["row"])
        for name, t in sample.items():
            assert torch.equal(loaded[name].cpu(), t.cpu())


READS = """
import sys, torch
assert "wooly" not in sys.modules
for path in sys.argv[1:]:
    loaded = torch.load(path, map_location="cpu")
    assert loaded["row"].tolist() == [3, 4, 5]
    assert loaded["row"].untyped_storage().data_ptr() == loaded["whole"].data_ptr()
    seen = set()
    torch.load(path, map_location=lambda storage, location: seen.add(location) or storage)
    print(*sorted(seen))
"""


def test_saved_file_loads_without_wooly(tmp_path, sample):
    (tmp_path / "without_wooly.py").write_text(READS)
    paths = []
    for zipped in (True, False):
        paths.append(tmp_path / f"{zipped}.pt")
        torch.save(sample, paths[-1], _use_new_zipfile_serialization=zipped)
        assert torch.load(paths[-1])["row"].is_cuda
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    argv = [
        sys.executable,
        tmp_path / "without_wooly.py",
        *paths,
    ]  # a new process, because a fork may have imported Wooly
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "cpu cuda:0\n" * 2), done.stderr


def test_load_missing_device_raises_error_of_cuda(sample):
    file = io.BytesIO()
    torch.save(sample, file)
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"Attempting to deserialize object on CUDA device 99 but torch\.cuda\.dev"):
        torch.load(file, map_location="cuda:99")


def test_module_and_optimizer_round_trip(cuda):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(cuda)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, device=cuda)).square().sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save((model, optimizer.state_dict()), file)
    file.seek(0)
    twin, state = torch.load(file, weights_only=False)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert b.is_cuda and torch.equal(a, b)
    assert state["state"][0]["exp_avg"].is_cuda and not state["state"][0]["step"].is_cuda
    restored = torch.optim.Adam(twin.parameters())
    restored.load_state_dict(state)
    assert torch.equal(restored.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_copies_and_pickles_do_not_share_memory(sample):
    for copied in (copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):  # noqa: S301  # scripts pickle tensors
        assert copied["whole"].is_cuda and torch.equal(copied["whole"], sample["whole"])
        copied["whole"][1, 0] = 9
        assert copied["whole"][1, 0].item() == 9 and sample["whole"][1, 0].item() == 3
    assert address(copy.deepcopy(sample)["row"]) != address(sample["row"])
    twins = copy.deepcopy(sample)
    twins["row"].zero_()
    assert twins["whole"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_storage_reports_and_accepts_cuda(cuda):
    t = torch.arange(4, dtype=torch.uint8, device=cuda)
    storage = t.untyped_storage()
    assert storage.device == torch.device("cuda", 0) and storage.is_cuda and storage.tolist() == [0, 1, 2, 3]
    host = storage.cpu()
    assert host.device.type == "cpu" and host.tolist() == [0, 1, 2, 3] and storage.cuda() is storage
    there = host.cuda()
    assert there.device == storage.device and there.tolist() == [0, 1, 2, 3]
    assert storage.clone().data_ptr() != storage.data_ptr() and storage.clone().tolist() == [0, 1, 2, 3]
    made = torch.UntypedStorage(4, device=cuda)
    assert made.copy_(storage).tolist() == [0, 1, 2, 3] and len(torch.UntypedStorage(3)) == 3


def test_sharing_tensor_with_process_raises(sample):
    assert sample["whole"].share_memory_() is sample["whole"]


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", 0])
def test_safetensors_round_trip(tmp_path, cuda, device):
    path = tmp_path / "x.safetensors"
    sent = {"a": torch.randn(2, 3, device=cuda), "b": torch.ones(3, dtype=torch.bfloat16, device=cuda)}
    save_file(sent, path)
    kind = "cpu" if device == "cpu" else "cuda"
    for name, t in load_file(path, device=device).items():
        assert t.device.type == kind and t.dtype == sent[name].dtype and torch.equal(t.cpu(), sent[name].cpu())
    with safe_open(path, framework="pt", device=device) as file:
        assert torch.equal(file.get_tensor("a").cpu(), sent["a"].cpu())
        part = file.get_slice("a")[:, 1:]
    assert part.device.type == kind and torch.equal(part.cpu(), sent["a"][:, 1:].cpu())


def test_safetensors_detects_shared_memory(tmp_path, cuda):
    t = torch.ones(2, 3, device=cuda)
    with pytest.raises(RuntimeError, match="Some tensors share memory"):
        save_file({"a": t, "b": t[0]}, tmp_path / "x.safetensors")
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}).to(cuda)
    tied["b"].weight = tied["a"].weight
    save_model(tied, tmp_path / "m.safetensors")
    before = tied["a"].weight.detach().clone()
    with torch.no_grad():
        tied["a"].weight.zero_()
    assert load_model(tied, tmp_path / "m.safetensors", device="cuda") == (set(), [])
    assert torch.equal(tied["b"].weight, before)


def test_pickle_and_copies_to_device_under_default_device(sample):
    with torch.device("cuda"):
        for loaded in (pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample)):  # noqa: S301  # its own bytes
            assert loaded["host"].device.type == "cpu"
            assert torch.equal(loaded["weight"], sample["weight"])
            assert loaded["turned"].tolist() == sample["turned"].tolist()


@pytest.fixture
def waits(cuda, monkeypatch):
    """The reads for which the script has waited, as (buffer, offset, memory)."""
    link, found = api.attached_links()[0], []
    ask = link.ask
    monkeypatch.setattr(link, "ask", lambda *args: found.append(args) or ask(*args))
    return found


def many(where):
    """Sixty small tensors of several dtypes, two views of one storage, empty and large ones."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    found = {f"p{k}": torch.arange(k % 7 + 1, device=where).to(dtypes[k % 4]) for k in range(60)}
    base = torch.arange(12.0, device=where)
    large = torch.arange(50_000, device=where)
    return found | {"row": base[4:8], "empty": torch.empty(0, 3, device=where), "large": large, "base": base}


def test_torch_save_reads_many_small_tensors_with_one_wait(cuda, waits):
    given, file = many(cuda), io.BytesIO()
    torch.save({"optimizer": given, "step": 3}, file)
    assert len(waits) <= 2 + len(given) // TOGETHER, len(waits)
    file.seek(0)
    found = torch.load(file, map_location="cpu")["optimizer"]
    assert all(torch.equal(found[name], t) for name, t in many("cpu").items())
    assert found["row"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
    for t in given.values():  # a second file has the values of its time
        t.copy_(t.flip(0)) if t.numel() else None
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    assert torch.equal(
        torch.load(file, map_location="cpu")["p5"], torch.arange(6, device="cpu").to(torch.bfloat16).flip(0)
    )


def test_safetensors_reads_many_small_tensors_with_one_wait(cuda, waits, tmp_path):
    given = many(cuda)
    del given["row"]  # safetensors refuses tensors that share memory
    # This file has imported `save_file` before Wooly was enabled.
    safetensors.torch.save_file(given, tmp_path / "weights.safetensors")
    assert len(waits) <= 3 + len(given) // TOGETHER, len(waits)
    found = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(found[name], t) for name, t in many("cpu").items() if name != "row")


def test_error_of_an_operation_before_is_raised_by_torch_save(cuda):
    given = many(cuda)
    given["p3"] = torch.arange(4.0, device=cuda)[torch.tensor([9], device=cuda)]
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.save(given, io.BytesIO())
    torch.save(many(cuda), io.BytesIO())
