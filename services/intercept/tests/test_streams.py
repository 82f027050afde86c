"""Streams, events, times, torch.accelerator and nvtx. Streams of other libraries raise errors."""

import threading
import time

import pytest
import torch
from wooly import api
from wooly.facade import streams
from wooly.torch_private import raw_device


def test_stream_reports_cuda(cuda):
    one, two = torch.cuda.Stream(), torch.cuda.Stream(device="cuda:0", priority=-1)
    for s in (one, two):
        assert isinstance(s, torch.cuda.Stream) and isinstance(s, torch.Stream) and s.device == torch.device("cuda", 0)
    assert one != two and one == one and len({one, two, one}) == 2 and two.priority == -1
    assert repr(one).startswith("<torch.cuda.Stream device=cuda:0 cuda_stream=0x")
    assert torch.cuda.default_stream().cuda_stream == 0 and one.cuda_stream > 0
    assert not one.is_capturing() and one.native_handle == one.cuda_stream
    torch.cuda.synchronize()
    assert one.query() and not isinstance(3, torch.Stream)


def test_current_stream_is_per_block_and_thread(cuda):
    default, stream, inner = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(stream) as given:
        assert given is None and torch.cuda.current_stream() == stream
        with torch.cuda.stream(None), torch.cuda.stream(inner):
            assert torch.cuda.current_stream("cuda:0") == inner
        assert torch.cuda.current_stream() == stream
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    with stream, inner, stream:
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == default and seen == [default]
    torch.cuda.set_stream(stream)
    assert torch.cuda.current_stream() == stream
    torch.cuda.set_stream(default)


class Observed(torch.autograd.Function):
    """Notes the current stream of its backward, and sets another one there."""

    @staticmethod
    def forward(ctx, x, seen, inner):
        ctx.seen, ctx.inner = seen, inner
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch.cuda.current_stream())
        if ctx.inner is not None:
            with torch.cuda.stream(ctx.inner):
                ctx.seen.append(torch.cuda.current_stream())
            ctx.seen.append(torch.cuda.current_stream())
        return grad, None, None


def test_backward_and_hooks_run_under_the_stream_of_the_forward(cuda):
    default, one, two, inner = torch.cuda.default_stream(), *[torch.cuda.Stream() for _ in range(3)]
    for _ in range(2):
        seen, hooked = [], []
        x = torch.ones(2, device=cuda, requires_grad=True)
        with torch.cuda.stream(one):
            x = Observed.apply(x, seen, None)
        x = Observed.apply(x, seen, None)
        with torch.cuda.stream(two):
            x = Observed.apply(x, seen, inner)
            x = x + 1
            x.register_hook(lambda grad, hooked=hooked: hooked.append(torch.cuda.current_stream()))
        with torch.cuda.stream(inner):
            x.sum().backward()
            assert torch.cuda.current_stream() == inner
        assert seen == [two, inner, two, default, one] and hooked == [two]
        assert torch.cuda.current_stream() == default


def test_stream_set_in_a_backward_ends_with_it(cuda):
    stream, seen = torch.cuda.Stream(), []
    x = torch.ones(2, device=cuda, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: torch.cuda.set_stream(stream))
    z = y * 3
    z.register_hook(lambda grad: seen.append(torch.cuda.current_stream()))
    (z * 2).sum().backward()
    assert seen == [torch.cuda.default_stream()] == [torch.cuda.current_stream()]


def test_stream_history_keeps_the_latest_changes(cuda, monkeypatch):
    monkeypatch.setattr(streams, "_MAX_CHANGES", 8)
    history, made = streams._History(), []
    for _ in range(20):
        stream = torch.cuda.Stream()
        history.add(stream)
        made.append(((torch.ones(1, requires_grad=True) * 2).grad_fn._sequence_nr(), stream))
    assert [history.at(number) for number, _ in made[-4:]] == [stream for _, stream in made[-4:]]
    assert history.at(made[0][0]) is None


def test_streams_work_runs_in_order(cuda):
    stream = torch.cuda.Stream()
    x = torch.zeros(1000, device=cuda)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        y = x + 1
        y.record_stream(stream)
        done = stream.record_event()
    torch.cuda.current_stream().wait_event(done)
    done.wait()
    torch.cuda.current_stream().wait_stream(stream)
    assert y.sum().item() == 1000 and done.query()
    done.synchronize()


def wait_for(condition):
    """Ask until the answer is yes. Nothing else uses the device meanwhile."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_query_does_not_wait_and_becomes_true_without_other_calls(cuda, monkeypatch):
    link, stream = api.attached_links()[0], torch.cuda.current_stream()
    torch.cuda.synchronize()
    assert stream.query() and torch.cuda.Event().query()
    before, early = link.syncs, stream.record_event()
    with monkeypatch.context() as patch:
        patch.setattr(link.connection.channel, "poll_acks", lambda: None)  # as if the executor were busy
        x = torch.ones(100, device=cuda) + 1
        host = torch.zeros(100, pin_memory=True)
        host.copy_(x, non_blocking=True)
        copied = stream.record_event()
        assert early.query() and not copied.query() and not stream.query()
    wait_for(copied.query)
    assert host.tolist() == [2.0] * 100
    wait_for(stream.query)
    assert link.syncs <= before + 1  # the answer to the copy


def test_query_leaves_an_error_to_the_next_wait(cuda):
    torch.ones(3, device=cuda)[torch.tensor([7]).to(cuda)]
    failed = torch.cuda.current_stream().record_event()
    wait_for(failed.query)
    with pytest.raises(RuntimeError, match="index"):
        torch.cuda.synchronize()


def test_event_elapsed_time_measures_work(cuda):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(True)
    assert isinstance(start, torch.cuda.Event) and isinstance(start, torch.Event) and start.device is None
    x = torch.ones(300, 300, device=cuda)
    x.sum().item()
    before = time.perf_counter()
    start.record()
    for _ in range(20):
        x = (x @ x).clamp_(max=1)
    end.record(torch.cuda.Stream())
    within = (time.perf_counter() - before) * 1e3
    assert 0 < start.elapsed_time(end) <= within and start.device == torch.device("cuda", 0)
    assert end.elapsed_time(start) < 0


def test_event_without_timing_or_record_raises(cuda):
    timed, plain = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with pytest.raises(RuntimeError, match="Both events must be recorded before calculating elapsed time"):
        timed.elapsed_time(torch.cuda.Event(enable_timing=True))
    with pytest.raises(RuntimeError, match="Both events must be created with argument 'enable_timing=True'"):
        timed.elapsed_time(plain)
    assert plain.query() and repr(plain) == "<torch.cuda.Event uninitialized>"
    plain.synchronize()


def test_torch_stream_and_event_are_those_of_cuda(cuda):
    for stream in (torch.Stream("cuda"), torch.Stream(device="cuda:0", priority=0), torch.Stream(0), torch.Stream()):
        assert type(stream) is torch.cuda.Stream
    for event in (torch.Event("cuda"), torch.Event(enable_timing=True), torch.Event()):
        assert type(event) is torch.cuda.Event
    assert issubclass(torch.cuda.Stream, torch.Stream) and torch.Stream("cpu").device.type == "cpu"


def test_accelerator_reports_cuda(cuda):
    acc = torch.accelerator
    assert acc.current_accelerator() == torch.device("cuda") and acc.is_available() and acc.current_device_index() == 0
    assert acc.device_count() == torch.cuda.device_count() and acc.current_stream() == torch.cuda.current_stream()
    assert acc.memory_allocated() == torch.cuda.memory_allocated()
    (free, total), whole = acc.get_memory_info(), torch.cuda.mem_get_info()[1]  # other processes change what is free
    assert 0 < free <= total == whole
    assert torch.get_device_module() is torch.cuda is torch.get_device_module("cuda")
    acc.set_device_index(0)
    with acc.device_index(0):
        acc.synchronize()


def test_default_device_reports_cuda(cuda):
    torch.set_default_device("cuda")
    try:
        assert torch.get_default_device() == torch.device("cuda", 0)
        assert torch.tensor(1).is_cuda and torch.ones(1).is_cuda and torch.as_tensor([1.0]).is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.get_default_device().type == "cpu" and not torch.tensor(1).is_cuda


def test_raw_device_in_a_mode_is_not_the_shown_device(cuda):
    t, host = torch.ones(2, device="cuda"), torch.ones(2)
    with torch.device("cuda"):
        assert t.device == torch.device("cuda", 0)
        assert [raw_device(t).type, raw_device(host).type] == ["wooly", "cpu"]


def test_nvtx_ranges_nest(cuda):
    nvtx = torch.cuda.nvtx
    assert [nvtx.range_push("a"), nvtx.range_push("b"), nvtx.range_pop(), nvtx.range_pop()] == [0, 1, 1, 0]
    assert nvtx.range_pop() < 0
    with nvtx.range("step {}", 3):
        nvtx.mark("here")
    nvtx.range_end(nvtx.range_start("anywhere"))


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: torch.cuda.ExternalStream(1 << 40), r"use torch\.cuda\.Stream\(\)"),
    ],
)
def test_unsupported_call_error_has_advice(cuda, call, hint):
    with pytest.raises(NotImplementedError, match=hint):
        call()
    assert not torch.cuda.is_current_stream_capturing()


def test_dlpack_passes_between_streams_of_the_process(cuda):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = torch.arange(3.0, device="cuda") + 1
        y = torch.from_dlpack(x)
    assert torch.cuda.ExternalStream(second.cuda_stream) == second and second.cuda_stream not in (
        0,
        1,
        2,
        first.cuda_stream,
    )
    z = torch.from_dlpack(x.__dlpack__(stream=second.cuda_stream))
    y += 1
    assert x.tolist() == z.tolist() == [2, 3, 4] and z.is_cuda


def test_sleep_occupies_device_and_does_not_wait(cuda):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    torch.cuda._sleep(30_000_000)
    torch.cuda.synchronize()
    assert time.perf_counter() - begun >= 0.03
    with pytest.raises(ValueError, match="one minute"):
        torch.cuda._sleep(1 << 62)
    torch.cuda._sleep(0)


def test_event_whose_answer_is_there_does_not_wait_for_a_later_copy(cuda, monkeypatch):
    x = torch.arange(8.0, device=cuda).exp()
    first, second = [torch.zeros(8, pin_memory=True) for _ in range(2)]
    first.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    wait_for(copied.query)
    second.copy_(x + 1, non_blocking=True)
    link = api.attached_links()[0]
    with monkeypatch.context() as patch:
        patch.setattr(link, "wait", lambda *args, **options: pytest.fail("it waits"))
        copied.synchronize()
    assert first.tolist() == torch.arange(8.0).exp().tolist()
    torch.cuda.synchronize()
    assert torch.equal(second, first + 1)
