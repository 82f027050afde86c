"""`torch.compile` on the device: same numbers as eager, one program per call, and eager calls where this is not possible."""

import contextlib
import copy
import io
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.export.passes import move_to_device_pass
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from wooly import api
from wooly.graphs import KINDS_KEPT, counters

pytestmark = [pytest.mark.connected, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted:
    """Number of recorded, replayed and eager calls in a block."""

    def __enter__(self):
        self.before = dict(vars(counters))
        return self

    def __exit__(self, *exc):
        for name, before in self.before.items():
            setattr(self, name, getattr(counters, name) - before)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))


def test_compile_inference_second_call_is_one_program(cuda):
    model = mlp().to(cuda)
    compiled = torch.compile(model)
    with torch.no_grad(), Counted() as did:
        for _ in range(4):
            x = torch.randn(3, 4, device=cuda)
            programs = api.session_stats()["programs"]
            y = compiled(x)
            assert torch.equal(y, model(x))
    assert (did.recorded, did.replayed, did.eager) == (1, 3, 0)
    torch.cuda.synchronize()
    programs = api.session_stats()["programs"]
    with torch.no_grad():
        compiled(x)
    assert api.session_stats()["programs"] == programs + 1


def test_compile_training_equals_eager_on_cpu(cuda):
    local = mlp()
    model = copy.deepcopy(local).to(cuda)
    compiled = torch.compile(model)
    sides = [(local, local, "cpu"), (compiled, model, cuda)]
    losses = []
    with Counted() as did:
        for call, module, device in sides:
            torch.manual_seed(1)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            found = []
            for _ in range(6):
                x, y = torch.randn(5, 4), torch.randint(0, 2, (5,))
                loss = nn.functional.cross_entropy(call(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            losses.append(found)
    assert losses[0] == losses[1]
    assert (did.recorded, did.replayed, did.eager) == (2, 10, 0)


def test_compile_gradients_of_inputs_and_some_results_equal_eager(cuda):
    def f(a, b):
        return a * b, (a + b).tanh(), a.detach() + 1

    compiled = torch.compile(f)
    for use in ([0, 1], [0, 1], [0, 1]):
        found = []
        for function in (f, compiled):
            torch.manual_seed(2)
            a = torch.randn(3, device=cuda, requires_grad=True)
            b = torch.randn(3, device=cuda)
            outs = function(a, b)
            assert not outs[2].requires_grad and not b.requires_grad
            sum(outs[i].sum() for i in use).backward()
            found.append([a.grad, *outs])
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_compile_backward_of_other_results_raises(cuda):
    compiled = torch.compile(lambda a: (a * 2, a * 3))
    a = torch.randn(3, device=cuda, requires_grad=True)
    compiled(a)[0].sum().backward()
    with pytest.raises(NotImplementedError, match=r"gradients for another set of results"):
        compiled(a)[1].sum().backward()


def test_compile_forwards_without_backward_are_rarely_recorded(cuda):
    compiled = torch.compile(lambda a: a.sin() * 2)
    a = torch.randn(3, device=cuda, requires_grad=True)
    with Counted() as did:
        for _ in range(40):
            y = compiled(a)
    assert did.recorded < 15 and did.recorded + did.eager == 40
    with Counted() as did:
        for _ in range(20):
            y = compiled(a)
            (grad,) = torch.autograd.grad(y.sum(), a)
    assert did.replayed > 10  # a backward that comes late is still recorded
    assert torch.equal(y, a.sin() * 2) and torch.equal(grad, torch.autograd.grad((a.sin() * 2).sum(), a)[0])


def test_compile_backward_frees_saved_tensors(cuda, no_garbage):
    compiled = torch.compile(lambda a: (a.sin().cos() * a).exp())
    a = torch.randn(100_000, device=cuda, requires_grad=True)
    for _ in range(2):
        compiled(a).sum().backward()
        a.grad = None
    torch.cuda.synchronize()
    idle = torch.cuda.memory_allocated()
    loss = compiled(a).sum()
    assert torch.cuda.memory_allocated() > idle + 400_000
    loss.backward()
    a.grad = None
    assert torch.cuda.memory_allocated() < idle + 400_000
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_compile_argument_changed_before_backward_raises_error_of_pytorch(cuda):
    compiled = torch.compile(lambda a, b: a * b)
    a = torch.ones(3, device=cuda, requires_grad=True)
    b = torch.ones(3, device=cuda)
    compiled(a, b).sum().backward()
    y = compiled(a, b).sum()
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_compile_arguments_are_written_in_place(cuda):
    def f(cache, x, at):
        cache.index_copy_(0, at, x)
        return cache.sum(0)

    compiled = torch.compile(f)
    found = []
    for function in (f, compiled):
        cache = torch.zeros(8, 3, device=cuda)
        results = []
        for i in range(5):
            row, at = torch.full((1, 3), float(i + 1), device=cuda), torch.tensor([i], device=cuda)
            results.append(function(cache, row, at).tolist())
            assert cache.cpu()[i].tolist() == [i + 1.0] * 3  # does not use the host copy of an earlier read
        found.append(results)
    assert found[0] == found[1]


def test_compile_running_statistics_change_in_every_call(cuda):
    local = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = copy.deepcopy(local).to(cuda)
    compiled = torch.compile(model)
    for _ in range(4):
        x = torch.randn(2, 3, 8, 8)
        (compiled(x.to(cuda)).sum() - local(x).sum().to(cuda)).backward()
    for ours, theirs in zip(model.state_dict().values(), local.state_dict().values(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_compile_random_numbers_continue_between_calls(cuda):
    def f(x):
        return nn.functional.dropout(x, 0.5)

    compiled = torch.compile(f)
    x = torch.ones(64, device=cuda)
    found = []
    for function in (f, compiled):
        torch.cuda.manual_seed(3)
        found.append([function(x).tolist() for _ in range(4)])
    assert found[0] == found[1] and len({tuple(row) for row in found[0]}) == 4


def test_compile_result_is_argument_or_view_of_it(cuda):
    compiled = torch.compile(lambda x: (x, x[1:], x + 1))
    for n in range(3):
        x = torch.full((3, 2), float(n), device=cuda)
        with torch.no_grad():
            same, part, more = compiled(x)
        part.add_(10)
        assert same is x and x.tolist() == [[n, n], [n + 10, n + 10], [n + 10, n + 10]]
        assert more.tolist() == [[n + 1, n + 1]] * 3


def test_compile_results_share_storage(cuda):
    compiled = torch.compile(lambda x: (x * 2).chunk(2))
    for n in range(3):
        with torch.no_grad():
            a, b = compiled(torch.full((4,), float(n), device=cuda))
        assert a.tolist() == b.tolist() == [2 * n] * 2
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_compile_arguments_with_shared_storage_are_another_kind(cuda):
    def f(a, b):
        a.add_(1)
        return a + b

    compiled = torch.compile(f)
    for _ in range(3):
        x = torch.zeros(4, device=cuda)
        assert compiled(x[:2], x[2:]).tolist() == [1, 1]
        y = torch.zeros(2, device=cuda)
        assert compiled(y, y).tolist() == [2, 2]
        assert compiled(torch.zeros(2, device=cuda), torch.zeros(2, device=cuda)).tolist() == [1, 1]


def test_compile_graph_break_equals_eager(cuda):
    def f(x):
        y = x * 2
        if y.sum().item() > 0:
            y = y + 1
        return y.relu()

    compiled = torch.compile(f)
    for sign in (1, -1, 1, -1):
        x = torch.full((3,), float(sign), device=cuda)
        assert compiled(x).tolist() == f(x).tolist()


def test_compile_upload_inside_function_stays_eager(cuda):
    def f(x, host):
        return x + host.to(x.device)

    compiled = torch.compile(f)
    with Counted() as did:
        for n in range(3):
            host = torch.full((3,), float(n))
            assert compiled(torch.ones(3, device=cuda), host).tolist() == [n + 1.0] * 3
    assert did.replayed == 0 and did.eager == 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))).sin())


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # Dynamo asks for it, for a tensor of the CPU, too
def test_compile_equal_blocks_in_checkpoints_equal_eager(cuda):
    """Dynamo compiles the blocks once. The backward of one block is recorded before another block is computed again."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block() for _ in range(3)]).to(cuda)
    x = torch.linspace(-1, 1, 16, device=cuda).view(2, 8)
    losses = []
    for call in (lambda b: b, torch.compile):
        run = [call(copy.deepcopy(b)) for b in blocks]
        optimizer = torch.optim.SGD([p for b in run for p in b.parameters()], lr=0.1)
        for _ in range(4):
            y = x
            for block in run:
                y = checkpoint(block, y, use_reentrant=False)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(y.detach())
    assert all(torch.equal(a, b) for a, b in zip(losses[:4], losses[4:], strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # as above
def test_compile_inside_a_selective_checkpoint_equals_eager(cuda):
    """A compiled function among layers whose products are kept: the checkpoint computes its layers again once only."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8, bias=False).to(cuda), nn.Linear(8, 8, bias=False).to(cuda)
    x = torch.linspace(-1, 1, 16, device=cuda).view(2, 8)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    grads = []
    for inner in (lambda y: y.tanh().sin() * y, torch.compile(lambda y: y.tanh().sin() * y)):
        for _ in range(3):
            y = checkpoint(
                lambda x, inner=inner: last(inner(first(x))),
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
            grads.append(torch.autograd.grad(y.square().mean(), [*first.parameters(), *last.parameters()]))
    for found in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], found, strict=True))


def test_compile_with_saved_tensors_on_host_equals_eager(cuda):
    block = Block().to(cuda)
    compiled = torch.compile(block)
    grads = []
    for hooks in (
        contextlib.nullcontext(),
        contextlib.nullcontext(),
        torch.autograd.graph.save_on_cpu(pin_memory=True),
    ):
        x = torch.linspace(-1, 1, 16, device=cuda).view(2, 8).requires_grad_()
        with hooks:
            y = compiled(x)
        y.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    # Transposed weights come back from the host with another layout, so the last bits differ.
    torch.testing.assert_close(grads[2], grads[0])


def test_compile_changing_shapes_equal_eager(cuda):
    compiled = torch.compile(lambda x: x.softmax(-1) @ x.mT)
    with torch.no_grad():
        for n in (2, 3, 4, 2, 3, 4):
            x = torch.randn(n, 5, device=cuda)
            assert torch.equal(compiled(x), x.softmax(-1) @ x.mT)


def test_compile_kinds_above_limit_run_eagerly(cuda):
    compiled = torch.compile(lambda x: x * 2 + 1, dynamic=True)
    with Counted() as did, torch.no_grad():
        for n in range(2, KINDS_KEPT + 10):
            assert compiled(torch.ones(n, device=cuda)).tolist() == [3.0] * n
    assert did.eager > 0 and did.recorded <= KINDS_KEPT + 1


def test_compile_cuda_in_function_means_device(cuda):
    def f(x):
        kind = x.device.type
        y = torch.arange(3, device="cuda") + torch.zeros(3, device=x.device) + torch.ones(3).cuda().to("cuda:0")
        return (y + x if x.is_cuda else y), kind, torch.cuda.is_available()

    with Counted() as did:
        for _ in range(2):
            y, kind, there = torch.compile(f, fullgraph=True)(torch.ones(3, device=cuda))
            assert y.tolist() == [2, 3, 4] and (kind, there) == ("cuda", True)
    assert did.recorded + did.eager > 0


def test_compile_before_install_does_not_affect_compile_after(cuda):
    def f(x):
        return x + torch.arange(3, device="cuda") if torch.cuda.is_available() else x

    api._facade.uninstall()
    torch.compile(lambda x: x + torch.arange(3), backend="eager")(
        torch.ones(3)
    )  # now Dynamo knows the functions of PyTorch
    api._facade.install()
    assert torch.compile(f, fullgraph=True)(torch.ones(3, device=cuda)).tolist() == [1, 2, 3]


def test_dynamo_without_compile_does_not_trace_facade(cuda):
    x = torch.ones(2, device=cuda)
    assert torch._dynamo.explain(lambda x: {"x": x + 1})(x).graph_break_count == 0
    assert torch._dynamo.optimize("eager")(lambda x: x * 2 + 1)(x).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_methods_of_tensors_under_default_device_have_no_graph_break(cuda, backend):
    def f(x):
        return x.new_zeros(2) + x.new_full((2,), 2.0) + x.to("cuda") + x.cuda() + x.new_ones(2, dtype=torch.float64)

    x = torch.ones(2, device=cuda)
    with torch.device("cuda"):
        y = torch.compile(f, backend=backend, fullgraph=True)(x)
    assert y.tolist() == [5.0, 5.0] and y.device.type == "cuda"


@pytest.mark.skipif(not hasattr(torch._dynamo.utils, "build_stream"), reason="this release does not trace streams")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile_function_that_makes_stream_and_event_equals_eager(cuda, backend):
    def f(x):
        side, done = torch.cuda.Stream(device="cuda", priority=-1), torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
            done.record(side)
        torch.cuda.current_stream().wait_event(done)
        return y + 1

    compiled = torch.compile(f, backend=backend, fullgraph=True)
    for n in (1.0, 3.0):
        assert compiled(torch.tensor([n], device=cuda)).tolist() == [2 * n + 1]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_compile_with_device_context_equals_eager_and_restores_device(cuda):
    @torch.compile(fullgraph=True)
    def scaled(x):
        with torch.cuda.device(x.device.index):
            y = x + 1
        with torch.cuda.device(0):
            return y * 2

    before = torch.cuda.current_device()
    for _ in range(3):
        assert scaled(torch.ones(3, device=cuda)).tolist() == [4.0, 4.0, 4.0]
    assert torch.cuda.current_device() == before


def test_compile_device_error_names_operator_and_line(cuda):
    def f(x, i):
        return x.index_select(0, i) * 2

    compiled = torch.compile(f)
    x = torch.ones(3, device=cuda)
    compiled(x, torch.tensor([1], device=cuda)).tolist()
    with pytest.raises(RuntimeError, match=r"index_select.*out of range[\s\S]*test_compile\.py"):
        compiled(x, torch.tensor([9], device=cuda)).tolist()
    assert compiled(x, torch.tensor([2], device=cuda)).tolist() == [2.0]


def test_compile_wrong_call_raises_error_of_pytorch(cuda):
    compiled = torch.compile(lambda a, b: a @ b)
    with pytest.raises(RuntimeError, match="same reduction dim"):
        compiled(torch.ones(2, 3, device=cuda), torch.ones(2, 3, device=cuda))


def test_compile_host_function_uses_default_backend(cuda, monkeypatch):
    from wooly import dynamo

    asked = []
    monkeypatch.setattr(dynamo, "_default_backend", lambda graph, *_: asked.append(graph) or graph.forward)
    assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert len(asked) == 1


def test_compile_host_function_keeps_mode(cuda, monkeypatch):
    from torch._inductor import compile_fx

    asked = []

    def compile_(graph, inputs, config_patches=None, **more):
        asked.append(config_patches)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_)
    assert torch.compile(lambda x: x + 1, mode="max-autotune")(torch.ones(2)).tolist() == [2, 2]
    assert torch.compile(lambda x: x + 2, mode="reduce-overhead")(torch.ones(2)).tolist() == [3, 3]
    assert asked[0]["max_autotune"] and not any(patches["triton.cudagraphs"] for patches in asked)


def test_compile_inference_mode_and_autocast_equal_eager(cuda):
    model = mlp().to(cuda)
    compiled = torch.compile(model)
    x = torch.randn(3, 4, device=cuda)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))


def test_compile_backend_cudagraphs_sends_programs_again(cuda):
    local = mlp()
    model = copy.deepcopy(local).to(cuda)
    compiled = torch.compile(model, backend="cudagraphs")
    x = torch.randn(3, 4)
    with Counted() as did:
        for _ in range(4):
            for m, d in ((local, "cpu"), (compiled, cuda)):
                m(x.to(d)).square().sum().backward()
    assert did.replayed
    for theirs, ours in zip(local.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs.grad, ours.grad.cpu())


def test_compile_backend_cudagraphs_host_function_has_gradients(cuda):
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x * 3, backend="cudagraphs")(x).sum().backward()
    assert x.grad.tolist() == [3, 3]


# Dynamo looks at the gradient of every tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compile_compiled_autograd_gradients_equal_eager(cuda):
    local = mlp()
    model = copy.deepcopy(local).to(cuda)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (local, model)]
    x = torch.randn(5, 3, 4)

    @torch.compile
    def step(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        for k in range(5):
            for optimizer in optimizers:
                if k != 3:  # the gradients of two steps are added
                    optimizer.zero_grad()
            losses = [local(x[k]).square().sum(), step(x[k].to(cuda))]
            losses[0].backward()
            for optimizer in optimizers:
                optimizer.step()
            assert losses[0].item() == losses[1].item()
    for theirs, ours in zip(local.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours.cpu())
        assert torch.equal(theirs.grad, ours.grad.cpu())


def test_ahead_of_time_compilation_for_device_names_alternatives(cuda, monkeypatch):
    import torch._inductor

    compiled = []
    monkeypatch.setattr(
        torch._inductor, "_aoti_compile_and_package_inner", lambda graph, *a, **k: compiled.append(graph) or "x.pt2"
    )
    model, x = mlp().eval(), torch.ones(3, 4)
    exported = torch.export.export(copy.deepcopy(model).to(cuda), (x.to(cuda),))
    with pytest.raises(NotImplementedError, match=r"aoti_compile_and_package is not supported .* torch.export.save"):
        torch._inductor.aoti_compile_and_package(exported)
    with pytest.raises(NotImplementedError, match="aot_compile is not supported"):
        torch._inductor.aot_compile(exported.module(), (x.to(cuda),))
    assert not compiled
    assert torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,))) == "x.pt2"
    assert len(compiled) == 1


@pytest.mark.parametrize("read_before", [False, True])
@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_compiled_function_reads_known_values_at_each_call(cuda, read_before):
    """A recorded program would repeat the value of the first call."""

    @torch.compile(fullgraph=True)
    def scaled(x, n):
        return x * n.item() + 1

    @torch.compile(fullgraph=True)
    def chosen(x, mask):
        return x[mask] * 2, mask.nonzero()

    x = torch.arange(4.0, device=cuda)
    for k in range(1, 7):
        n, mask = torch.tensor(float(k)).to(cuda), torch.tensor([j % k == 0 for j in range(4)]).to(cuda)
        if read_before:
            n.item(), mask.tolist()
        assert scaled(x, n).tolist() == [j * k + 1 for j in range(4)]
        doubled, places = chosen(x, mask)
        expected = [j for j in range(4) if j % k == 0]
        assert doubled.tolist() == [2 * j for j in expected] and places.flatten().tolist() == expected


def test_compiled_function_asks_about_the_device_in_one_graph(cuda):
    @torch.compile(fullgraph=True)
    def ask(x):
        properties = torch.cuda.get_device_properties(x.device)
        used = torch.cuda.is_initialized() and torch.cuda.current_device() == x.device.index
        return x + properties.major if used and torch.cuda.get_device_capability() >= (8, 0) else x

    x = torch.ones(3, device=cuda)
    assert ask(x).tolist() == [1.0 + torch.cuda.get_device_properties(0).major] * 3
    assert isinstance(torch.cuda.get_device_properties(0), torch.cuda._CudaDeviceProperties)


class _Normed(nn.Module):
    """Converts its operand to float32 and back. An exported program checks the device of each tensor that it converts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.linear((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype))


@pytest.mark.parametrize("how", ["exported", "moved", "decomposed", "loaded"])
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:The given buffer is not writable"
)  # of torch 2.11's `load`
def test_exported_program_runs_on_device(cuda, how):
    torch.manual_seed(0)
    model, x = _Normed(), torch.randn(3, 4)
    expected = model(x)
    if how == "moved":
        program = move_to_device_pass(torch.export.export(model, (x,)), "cuda")
    else:
        program = torch.export.export(model.to(cuda), (x.to(cuda),))
    if how == "decomposed":
        program = program.run_decompositions()
    if how == "loaded":
        kept = io.BytesIO()
        torch.export.save(program, kept)
        kept.seek(0)
        program = torch.export.load(kept)
    run = program.module()
    for _ in range(2):
        found = run(x.to(cuda))
        assert found.device == torch.device("cuda:0")
        torch.testing.assert_close(found.cpu(), expected)
    with pytest.raises(RuntimeError, match=r"Tensor device mismatch! Expected: cuda(:0)?, Got: cpu"):
        run(x)


def test_assertion_about_metadata_compares_what_scripts_see(cuda):
    check = torch.ops.aten._assert_tensor_metadata.default
    x = torch.ones(3, device=cuda)
    check(x, [3], [1], torch.float32, device=torch.device("cuda:0"), layout=torch.strided)
    check(x, device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="Tensor device mismatch! Expected: cpu, Got: cuda:0"):
        check(x, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="Tensor dtype mismatch! Expected: Double, Got: float"):
        check(x, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_traced_graph_names_the_device_cuda_in_calls_that_pytorch_makes_itself(cuda, mode):
    def f(x):
        return torch.where(x > 0, x, 0.5), torch.ones(2, device=x.device)

    x = torch.tensor([-1.0, 2.0], device=cuda)
    graph = make_fx(f, tracing_mode=mode)(x)
    devices = [node.kwargs["device"] for node in graph.graph.nodes if "device" in node.kwargs]
    assert devices == [torch.device("cuda", 0)] * 2, graph.code
    assert graph(x)[0].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "aot_eager_decomp_partition"])
def test_compiled_checkpoint_draws_the_same_numbers_in_its_backward(cuda, backend):
    def noisy(t):
        return nn.functional.dropout(t * torch.rand_like(t), 0.5)

    compiled = torch.compile(lambda t: checkpoint(noisy, t, use_reentrant=False), backend=backend)
    x, seen = torch.ones(64, device=cuda, requires_grad=True), []
    for _ in range(4):
        (gradient,) = torch.autograd.grad((y := compiled(x)).sum(), x)
        assert torch.equal(gradient, y)
        seen.append(y)
    assert not any(torch.equal(a, b) for a, b in pairwise(seen))


def test_compiled_checkpoint_that_was_told_so_draws_new_numbers(cuda):
    again = {"use_reentrant": False, "preserve_rng_state": False}
    compiled = torch.compile(lambda t: checkpoint(lambda u: u * torch.rand_like(u), t, **again))
    x = torch.ones(64, device=cuda, requires_grad=True)
    (gradient,) = torch.autograd.grad((y := compiled(x)).sum(), x)
    assert not torch.equal(gradient, y)


def test_compiled_checkpoint_without_random_numbers_is_replayed(cuda):
    compiled = torch.compile(lambda t: checkpoint(torch.sin, t, use_reentrant=False))
    x = torch.ones(4, device=cuda, requires_grad=True)
    with Counted() as n:
        for _ in range(4):
            (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(gradient, x.cos()) and n.replayed >= 4 and not n.eager
