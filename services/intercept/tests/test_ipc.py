"""What a process sends to another for a tensor or an event: handles, refusals, and when it waits. Real pairs of processes are in
tests/multiprocess.
"""

import json
import multiprocessing
from multiprocessing.connection import Pipe
from multiprocessing.reduction import ForkingPickler
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from wooly import api, ipc
from wooly.errors import WoolyError
from wooly.ipc import Handle, HandleError

GOOD = {"name": "ab" * 16, "instance": "i", "executor": "e", "node": "n"}


def test_handle_survives_its_bytes():
    handle = Handle(**GOOD)
    assert Handle.unpack(handle.pack()) == handle and handle.pack() == Handle(**dict(reversed(GOOD.items()))).pack()


@pytest.mark.parametrize(
    "raw",
    [
        None,
        "text",
        b"",
        b"\xff" * 64,
        b"[" * 4000,
        b" " * 5000,
        b"null",
        b"[1]",
        json.dumps(GOOD | {"name": "ab"}).encode(),
        json.dumps(GOOD | {"name": "xy" * 16}).encode(),
        json.dumps(GOOD | {"node": 1}).encode(),
        json.dumps(GOOD | {"more": ""}).encode(),
        json.dumps({k: v for k, v in GOOD.items() if k != "node"}).encode(),
    ],
)
def test_bytes_that_are_no_handle_are_refused(raw):
    with pytest.raises(HandleError, match="invalid argument"):
        Handle.unpack(raw)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_handle_or_refused(raw):
    with pytest.raises(HandleError):
        Handle.unpack(raw)
    with pytest.raises(HandleError):
        ipc.check_event_handle(raw)


def test_reduction_names_one_buffer_for_all_views_and_keeps_the_layout(cuda):
    base = torch.arange(6.0, device=cuda).reshape(2, 3)
    rebuild, (kind, size, stride, offset, _, dtype, device, handle, nbytes, at, requires_grad, *_) = reduce_tensor(
        base.t()[1:]
    )
    assert rebuild is rebuild_cuda_tensor and kind is torch.Tensor and dtype is torch.float32 and not requires_grad
    assert (tuple(size), stride, offset, device, nbytes, at) == ((2, 2), (1, 3), 1, 0, 24, 0)
    assert reduce_tensor(base)[1][7] == handle
    assert Handle.unpack(handle).instance == api.attached_links()[0].device["instance"]
    assert reduce_tensor(torch.ones(2, device=cuda))[1][7] != handle
    assert reduce_tensor(torch.empty(0, device=cuda))[1][7] is None


def test_tensor_cannot_be_received_by_its_sender(cuda):
    t = torch.ones(3, device=cuda)
    with pytest.raises(RuntimeError, match="cannot receive what it has sent"):
        ForkingPickler.loads(ForkingPickler.dumps(t))
    assert t.sum().item() == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": "00" * 16}, "no buffer of this size"),
        (
            {"instance": "other", "executor": "x-1", "node": "far"},
            "is on the executor x-1 of node far, .*WOOLYAI_NODE=x-1",
        ),
    ],
)
def test_handle_of_nothing_or_of_another_executor_is_refused(cuda, change, error):
    t = torch.ones(3, device=cuda)
    raw = reduce_tensor(t)[1][7]
    wrong = Handle(**json.loads(raw) | change).pack()
    with pytest.raises(RuntimeError, match=error):
        torch.UntypedStorage._new_shared_cuda(0, wrong, 12, 0, wrong, 0, None, False)
    for nbytes in (0, -1, 1 << 50, "12"):
        with pytest.raises(HandleError, match="a storage cannot have"):
            torch.UntypedStorage._new_shared_cuda(0, raw, nbytes, 0, raw, 0, None, False)
    assert t.sum().item() == 3


def test_export_can_be_taken_back(cuda):
    t = torch.ones(3, device=cuda)
    raw = reduce_tensor(t)[1][7]
    torch.UntypedStorage._release_ipc_counter_cuda(raw, 0, device=0)
    assert reduce_tensor(t)[1][7] != raw  # nobody shared it any more


def test_non_leaf_that_requires_grad_is_refused(cuda):
    with pytest.raises(RuntimeError, match="non-leaf tensor which requires_grad"):
        reduce_tensor(torch.ones(2, device=cuda, requires_grad=True) * 2)


def test_failed_operation_is_raised_when_its_result_is_sent(cuda):
    t = torch.ones(3, device=cuda)[torch.tensor([7], device=cuda)]
    with pytest.raises(RuntimeError, match="index"):
        reduce_tensor(t)


def test_host_copies_of_sent_tensors_are_not_used_again(cuda):
    t, other = torch.ones(3, device=cuda), torch.ones(3, device=cuda)
    t.cpu(), other.cpu()
    link = api.attached_links()[0]
    reduce_tensor(t)
    before = link.syncs
    t.cpu(), t.cpu()
    assert link.syncs - before == 2
    other.cpu()
    assert link.syncs - before == 2
    address = t.data_ptr()
    del t
    while (again := torch.ones(3, device=cuda)).data_ptr() != address:  # the id belongs to another tensor now
        torch.wooly.synchronize()
    again.cpu()
    before = link.syncs
    again.cpu()
    assert link.syncs == before


def test_recorded_session_and_old_executor_do_not_share(cuda, monkeypatch):
    t = torch.ones(3, device=cuda)
    torch.wooly.synchronize()
    link = api.attached_links()[0]
    with monkeypatch.context() as patch:
        patch.setattr(link, "log", Mock())
        with pytest.raises(WoolyError, match="`wooly record` cannot record"):
            reduce_tensor(t)
    with monkeypatch.context() as patch:
        patch.delitem(link.device, "ipc")
        with pytest.raises(WoolyError, match="cannot share memory between processes; update it"):
            reduce_tensor(t)
    assert reduce_tensor(t)[1][7]


def test_session_that_shares_stays_at_its_executor(cuda):
    reduce_tensor(torch.ones(3, device=cuda))
    link = api.attached_links()[0]
    assert link.shares and link.recovery is None


@pytest.mark.parametrize("tell", ["lock", "event", "semaphore", "pipe"])
def test_process_that_shares_waits_where_processes_synchronise(cuda, tell):
    context = multiprocessing.get_context("spawn")
    lock, event, semaphore, (way, _there) = context.Lock(), context.Event(), context.Semaphore(), Pipe()
    t = torch.ones(3, device=cuda)
    reduce_tensor(t)
    link, recorder = api.attached_links()[0], api.attached_device().recorder
    torch.wooly.synchronize()
    before = link.syncs
    t += 1

    def locked():
        with lock:
            pass

    {"lock": locked, "event": event.set, "semaphore": semaphore.release, "pipe": lambda: way.send("done")}[tell]()
    assert not recorder.open and not link.unanswered and link.syncs > before
    before = link.syncs
    locked()
    assert link.syncs == before  # there is nothing new to wait for


def test_error_at_a_fence_comes_at_the_next_wait(cuda):
    t = torch.ones(3, device=cuda)
    reduce_tensor(t)
    t[torch.tensor([7], device=cuda)]
    multiprocessing.get_context("spawn").Event().set()
    with pytest.raises(RuntimeError, match="index"):
        torch.wooly.synchronize()
    assert t.sum().item() == 3


def test_event_of_another_process_is_done_when_its_handle_arrives(cuda):
    event, t = torch.cuda.Event(interprocess=True), torch.ones(3, device=cuda)
    link = api.attached_links()[0]
    t += 1
    event.record()
    assert not link.unanswered
    handle = event.ipc_handle()
    assert (
        len(handle) == 64
        and event.ipc_handle() == handle
        and torch.cuda.Event(interprocess=True).ipc_handle() != handle
    )
    there = ForkingPickler.loads(ForkingPickler.dumps(event))
    assert isinstance(there, torch.cuda.Event) and there.ipc_handle() == handle
    before = link.syncs
    assert there.query() and there.device == torch.device("cuda", 0)
    there.wait(), there.synchronize(), torch.cuda.current_stream().wait_event(there)
    assert link.syncs == before
    t += 1
    there.record()
    assert not link.unanswered


def test_event_without_handle_raises(cuda):
    with pytest.raises(RuntimeError, match=r"invalid resource handle.*interprocess=True"):
        torch.cuda.Event().ipc_handle()
    for use in ("record", "ipc_handle"):
        with pytest.raises(RuntimeError, match=r"invalid argument.*both"):
            getattr(torch.cuda.Event(enable_timing=True, interprocess=True), use)()
    with pytest.raises(RuntimeError, match="handle of an event"):
        torch.cuda.Event.from_ipc_handle(0, b"x" * 64)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_storage_that_is_not_on_the_device_is_refused(cuda, device):
    with pytest.raises(RuntimeError, match="only available on CUDA"):
        torch.empty(3, device=device).untyped_storage()._share_cuda_()
