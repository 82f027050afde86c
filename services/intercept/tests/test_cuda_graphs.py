"""CUDA graphs: capture runs nothing, a replay equals eager work bit for bit, and the memory lives as long as the graph."""

import copy
import random
import signal
import threading

import pytest
import torch
from torch import nn
from wooly import api
from wooly.graphs import capture, captured

NOT_PERMITTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"


def host(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)).to("cuda")


@pytest.fixture
def side(cuda):
    """A stream on which captures may begin. Afterwards, the default stream is current again."""
    yield torch.cuda.Stream()
    torch.cuda.set_stream(torch.cuda.default_stream())


def step_of(model, optimizer, x, y):
    """One training step, whose loss is returned."""

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_graph_inference_reads_inputs_at_replay(side):
    model, x = mlp(), torch.zeros(4, 6, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    at = y.data_ptr()
    assert not y.any()
    programs = api.session_stats()["programs"]
    for seed in range(5):
        x.copy_(host(seed, 4, 6))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, model(x)) and y.data_ptr() == at
    assert api.session_stats()["programs"] > programs


def test_capture_of_a_first_call_whose_trial_on_zeros_fails_computes_at_replay(side):
    """Without a warm-up. Integers are divided by zero in the trial."""
    x, y = torch.arange(9, 17, dtype=torch.int16, device="cuda"), torch.full((8,), 5, dtype=torch.int16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rest = x % y
        x.floor_divide_(y)
    graph.replay()
    assert rest.tolist() == [4, 0, 1, 2, 3, 4, 0, 1] and x.tolist() == [1, 2, 2, 2, 2, 2, 3, 3]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        x % torch.zeros_like(x)
    assert (x % y).tolist() == [1, 2, 2, 2, 2, 2, 3, 3]


def test_replay_sends_one_program_without_definition(side):
    model, x = mlp(), torch.zeros(4, 6, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    before = api.session_stats()
    for _ in range(10):
        graph.replay()
    after = api.session_stats()
    assert after["programs"] - before["programs"] == 10
    assert after["bytes_sent"] - before["bytes_sent"] < 10 * 600


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, foreach=False),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01).to("cuda"), capturable=True, fused=True),
    ],
    ids=["sgd", "adam", "adamw", "fused"],
)
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
def test_training_step_replay_equals_eager(side, make):
    x, y = torch.zeros(4, 6, device="cuda"), torch.zeros(4, 3, device="cuda")
    model = mlp(dropout=0.3)
    optimizer = make(model.parameters())
    step = step_of(model, optimizer, x, y)
    step()  # the optimizer makes its state
    eager = copy.deepcopy(model)
    theirs = make(eager.parameters())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    eager_step = step_of(eager, theirs, x, y)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    rng = torch.cuda.get_rng_state()
    with torch.cuda.graph(graph):
        loss = step()
    assert same(model, eager) and torch.equal(torch.cuda.get_rng_state(), rng)
    for seed in range(10):
        x.copy_(host(seed, 4, 6))
        y.copy_(host(100 + seed, 4, 3))
        rng = torch.cuda.get_rng_state()
        graph.replay()
        advanced = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(rng)
        assert torch.equal(eager_step(), loss) and same(model, eager)
        assert torch.equal(torch.cuda.get_rng_state(), advanced)


def test_autocast_and_scaler_replay_equals_eager(side):
    x = torch.zeros(4, 6, device="cuda")
    model, scaler = mlp(), torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.zeros((), device="cuda"))  # makes its state

    def step(model):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        return loss

    eager, graph = copy.deepcopy(model), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model)
    for seed in range(3):
        x.copy_(host(seed, 4, 6))
        graph.replay()
        assert torch.equal(step(eager), loss)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


def test_dropout_replays_differ_and_repeat_after_seed(side):
    x = torch.ones(500, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = nn.functional.dropout(x, 0.5)
        z = nn.functional.dropout(x, 0.5)

    def run():
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            graph.replay()
            found += [y.clone(), z.clone()]
        return found

    def eager():
        torch.manual_seed(3)
        return [nn.functional.dropout(x, 0.5) for _ in range(6)]

    first = run()
    assert all(not torch.equal(first[i], first[j]) for i in range(6) for j in range(i))
    assert all(map(torch.equal, first, run())) and all(map(torch.equal, first, eager()))


def test_registered_generator_is_drawn_from_and_other_is_refused(side):
    mine, other = [torch.Generator("cuda").manual_seed(5) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(mine)
    with torch.cuda.graph(graph):
        y = torch.rand(8, device="cuda", generator=mine)
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, torch.rand(8, device="cuda", generator=other))
    refused = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        refused.capture_begin()
        with pytest.raises(RuntimeError, match="Attempt to increase offset for a CUDA generator not in capture mode"):
            torch.rand(8, device="cuda", generator=other)
        with pytest.raises(RuntimeError, match=INVALIDATED):
            refused.capture_end()


def test_seed_in_capture_raises_and_checkpoint_draws_same_numbers(side):
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(200, device="cuda", requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="seed of a CUDA generator cannot be set while"):
            torch.cuda.manual_seed(1)
        y = checkpoint(lambda t: nn.functional.dropout(t, 0.5), x, use_reentrant=False)
        y.sum().backward()
    for _ in range(2):
        graph.replay()
        assert torch.equal(x.grad, y.detach()) and 0 < y.count_nonzero() < 200


def test_make_graphed_callables_equals_eager(side):
    model = mlp(dropout=0.5)
    eager = copy.deepcopy(model)
    graphed = torch.cuda.make_graphed_callables(model, (torch.randn(4, 6, device="cuda", requires_grad=True),))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    for seed in range(4):
        found = []
        for m, optimizer in zip((graphed, eager), optimizers, strict=True):
            torch.manual_seed(seed)
            x = host(seed, 4, 6).to("cuda").requires_grad_()
            optimizer.zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            optimizer.step()
            found.append((loss.detach(), x.grad))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]) and same(model, eager)


def test_attention_backward_in_other_graph_draws_numbers_of_forward(side):
    """The backward of a whole operator computes the forward again, with its random numbers."""
    sample = torch.randn(1, 2, 4, 8, device="cuda", requires_grad=True)

    def attend(q):
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    graphed = torch.cuda.make_graphed_callables(attend, (sample,))
    for seed in range(3):
        found = []
        for call in (graphed, attend):
            torch.manual_seed(seed)
            q = host(seed, 1, 2, 4, 8).to("cuda").requires_grad_()
            call(q).sum().backward()
            found.append(q.grad)
        assert torch.equal(*found)


def test_compiled_function_inside_capture_equals_eager(side):
    model, x = mlp(), torch.zeros(4, 6, device="cuda")
    compiled = torch.compile(model)
    for _ in range(3):
        compiled(x).sum().backward()
    eager, graph = copy.deepcopy(model), torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        y = compiled(x)
        y.sum().backward()
    for seed in range(3):
        x.copy_(host(seed, 4, 6))
        eager.zero_grad()
        graph.replay()
        expected = eager(x)
        expected.sum().backward()
        assert torch.equal(y, expected)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


def test_compile_reduce_overhead_equals_eager(side):
    model = mlp()
    compiled = torch.compile(model, mode="reduce-overhead")
    for seed in range(3):
        x = host(seed, 4, 6).to("cuda")
        assert torch.equal(compiled(x), model(x))


def test_graph_inside_graph_equals_its_work(side):
    x = torch.zeros(4, device="cuda")
    inner, outer = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(inner):
        y = (x * 2).relu() + torch.rand(4, device="cuda")
    with torch.cuda.graph(outer):
        inner.replay()
        z = y + 1
    for seed in range(2):
        x.copy_(host(seed, 4))
        torch.manual_seed(seed)
        outer.replay()
        torch.manual_seed(seed)
        assert torch.equal(z, (x * 2).relu() + torch.rand(4, device="cuda") + 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.tensor(1.0, device="cuda"),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        lambda x: print(x),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        torch.no_grad()(lambda x: torch.add(x, x, alpha=x.sum())),
    ],
)
def test_call_that_waits_in_capture_raises_and_session_stays_whole(side, call):
    x = torch.ones(4, device="cuda")
    x.tolist()  # a host copy of it exists
    kept = x + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        left = x * 3
        kept.add_(5)
        with pytest.raises(torch.AcceleratorError, match=NOT_PERMITTED):
            call(x)
        with pytest.raises(torch.AcceleratorError, match=INVALIDATED):
            graph.capture_end()
        assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="Called CUDAGraph::replay without a preceding successful capture"):
        graph.replay()
    assert kept.tolist() == [2.0] * 4 and left.tolist() == [0.0] * 4
    assert (x + left).tolist() == [1.0] * 4
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        kept.add_(1)
    again.replay()
    assert kept.tolist() == [3.0] * 4


def test_error_of_program_in_capture_ends_it(side):
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="mine"), torch.cuda.graph(graph):
        x.add_(1)
        raise ValueError("mine")
    with pytest.raises(RuntimeError, match="must match the size"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + torch.ones(3, device="cuda")
    assert x.tolist() == [1.0] * 4
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_wrong_order_of_calls_raises_error_of_pytorch(side):
    graph = torch.cuda.CUDAGraph()
    for call, name in ((graph.replay, "replay"), (graph.pool, "pool"), (graph.instantiate, "instantiate")):
        with pytest.raises(RuntimeError, match=f"Called CUDAGraph::{name}.* without a preceding successful capture"):
            call()
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        graph.capture_begin()
    with pytest.raises(torch.AcceleratorError, match="cannot be performed in the present state"):
        graph.capture_end()
    with torch.cuda.stream(side):
        with pytest.raises(RuntimeError, match="Unknown capture error mode"):
            graph.capture_begin(capture_error_mode="none")
        graph.capture_begin(capture_error_mode="relaxed")
        assert torch.cuda.is_current_stream_capturing() and side.is_capturing()
        assert not torch.cuda.default_stream().is_capturing()
        with pytest.raises(torch.AcceleratorError, match="cannot be performed in the present state"):
            torch.cuda.CUDAGraph().capture_begin()
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="end on the same stream"):
            graph.capture_end()
        torch.zeros(1, device="cuda")
        graph.capture_end()
        with pytest.raises(RuntimeError, match="already owns a captured graph"):
            graph.capture_begin()
    with pytest.raises(NotImplementedError, match="on the wooly device"):
        graph.raw_cuda_graph()
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        p = torch.zeros(2, device="cuda", requires_grad=True)
        p.grad = torch.ones_like(p)
        torch.optim.Adam([p]).step()


def test_other_thread_waits_until_capture_ends(side):
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    graph, started, errors = torch.cuda.CUDAGraph(), threading.Event(), []

    def work():
        try:
            graph.capture_end()
        except RuntimeError as e:
            errors.append(str(e))
        started.set()
        y.add_(1)
        errors.append(torch.cuda.is_current_stream_capturing())

    thread = threading.Thread(target=work)
    with torch.cuda.graph(graph):
        thread.start()
        started.wait()
        x.add_(1)
    thread.join()
    assert "attempt to terminate a thread-local capture sequence from another thread" in errors[0]
    assert errors[1:] == [False] and (x.tolist(), y.tolist()) == ([1.0] * 4, [2.0] * 4)
    graph.replay()
    assert (x.tolist(), y.tolist()) == ([2.0] * 4, [2.0] * 4)


def test_deleted_graph_in_capture_ends_it(side):
    x = torch.ones(4, device="cuda")
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        x.add_(1)
        del graph
        assert not side.is_capturing() and x.tolist() == [1.0] * 4


def test_memory_lives_as_long_as_graph(side, no_garbage):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph, x = torch.cuda.CUDAGraph(), torch.ones(1 << 18, device="cuda")
    with torch.cuda.graph(graph):
        y = (x + 1) * 2
    assert torch.cuda.memory_allocated() == before + (2 << 20)  # x and y; the sum is inside
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, pool=graph.pool()):
        z = y * 3
    assert other.pool() == graph.pool() and torch.cuda.memory_allocated() == before + (3 << 20)
    del x, y
    assert torch.cuda.memory_allocated() == before + (3 << 20)
    filler = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(4)]  # would reuse their memory
    graph.replay()
    other.replay()
    assert z.unique().tolist() == [12.0]
    graph.reset()
    other.replay()
    assert z.unique().tolist() == [12.0]
    del filler, other, graph
    assert torch.cuda.memory_allocated() == before + (1 << 20) and z[0].item() == 12
    reserved = torch.cuda.memory_reserved()
    del z
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() < reserved


def test_input_freed_in_capture_lives_on(side):
    graph, x = torch.cuda.CUDAGraph(), torch.full((64,), 3.0, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 2
        del x
    for _ in range(2):
        torch.full((64,), 9.0, device="cuda")
        graph.replay()
        assert y.tolist() == [6.0] * 64


def test_new_buffer_is_zero_at_each_replay(side):
    """An operator may read what was never written: a new buffer contains zeros."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.empty(8, device="cuda")
        x.add_(1)
    for _ in range(3):
        graph.replay()
        assert x.tolist() == [1.0] * 8


def test_long_capture_is_split_at_limits(side, monkeypatch):
    monkeypatch.setattr(captured, "MAX_INSTRUCTIONS", 7)
    model, x = mlp(dropout=0.5), torch.zeros(4, 6, device="cuda")
    eager = copy.deepcopy(model)
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        y = model(x)
        y.sum().backward()
    programs = api.session_stats()["programs"]
    graph.replay()
    assert api.session_stats()["programs"] - programs > 2
    for seed in range(3):
        x.copy_(host(seed, 4, 6))
        torch.manual_seed(seed)
        graph.replay()
        torch.manual_seed(seed)
        eager.zero_grad()
        expected = eager(x)
        expected.sum().backward()
        assert torch.equal(y, expected)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


def test_long_capture_stays_one_program(side):
    x = torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5000):
            x.add_(1)
    before = api.session_stats()["programs"]
    graph.replay()
    assert api.session_stats()["programs"] == before + 1 and x.tolist() == [5000.0] * 2


def test_replays_between_eager_work_keep_order(side):
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
        y = x + 1
    expected = torch.zeros(4)
    for i in range(20):
        x.add_(i)
        expected.add_(i)
        if i % 3:
            graph.replay()
            expected.mul_(2)
            assert torch.equal((y - 1).cpu(), expected)
    assert torch.equal(x.cpu(), expected)


def test_failed_replay_reports_line_of_capture(side):
    table, index = torch.arange(8.0, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = table.index_select(0, index)
    index.fill_(99)
    graph.replay()
    with pytest.raises(RuntimeError, match="out of range") as error:
        y.tolist()
    assert __file__ in str(error.value)
    index.fill_(3)
    graph.reset()
    with torch.cuda.graph(graph):
        y = table.index_select(0, index)
    graph.replay()
    assert y.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("link", [None, object()], ids=["no session", "another session"])
def test_replay_after_session_raises(side, link, monkeypatch):
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    with monkeypatch.context() as later:
        later.setattr(api.attached_device().recorder, "link", link)
        with pytest.raises(
            RuntimeError, match=r"session in which this CUDA graph was captured has ended.*capture the graph again"
        ):
            graph.replay()
    graph.replay()
    assert x.tolist() == [2.0] * 4


def test_debug_dump_lists_instructions(side, tmp_path):
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
    with pytest.warns(UserWarning, match="debug not enabled"):
        graph.debug_dump(str(tmp_path / "none"))
    graph.enable_debug_mode()
    graph.debug_dump(str(tmp_path / "graph.dot"))
    graph.instantiate()
    text = (tmp_path / "graph.dot").read_text()
    assert "add" in text and "test_cuda_graphs.py" in text and not (tmp_path / "none").exists()


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this release of PyTorch has no accelerator graphs")
def test_accelerator_graph_captures_on_current_stream(side):
    x = torch.ones(4, device="cuda")
    graph = torch.accelerator.Graph()
    with side, graph:
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0] * 4
    graph.reset()
    with side, graph:
        x.mul_(3)
    graph.replay()
    assert x.tolist() == [6.0] * 4


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_interrupted_replays_run_whole_or_not_at_all(side):
    class AlarmError(Exception):
        pass

    def ring(number, frame):
        raise AlarmError

    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y.sub_(1)
    moments, raised = random.Random(0), 0
    before = signal.signal(signal.SIGALRM, ring)
    try:
        while raised < 30:
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0001, 0.002))
                for _ in range(200_000):
                    graph.replay()
                pytest.fail("the alarm did not come")
            except AlarmError:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert x[0].item() > 0 and torch.equal(x, -y)


def test_capture_that_waits_for_another_thread_on_the_device_ends(side, monkeypatch):
    monkeypatch.setattr(capture, "WAIT_S", 0.2)
    x, errors = torch.ones(4, device="cuda"), []

    def work():
        try:
            torch.zeros(4, device="cuda")
        except RuntimeError as e:
            errors.append(str(e))

    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=work)
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        y = x + 1
        thread.start()
        thread.join()
    assert NOT_PERMITTED in errors[0] and "Another thread has captured a CUDA graph" in errors[0]
    graph.replay()
    assert y.tolist() == [2.0] * 4 and torch.zeros(1, device="cuda").item() == 0
