"""Small values that the client computes itself: no wait, and the same bits as the device's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wooly.api import attached_links
from wooly.device import current_devices
from wooly.kernels import host_values
from wooly.kernels.host_copies import part_of


@pytest.fixture
def waits(cuda):
    """A function that returns the number of answers to reads since the last call."""
    link = attached_links()[0]
    last = link.syncs

    def since():
        nonlocal last
        last, before = link.syncs, last
        return last - before

    torch.cuda.synchronize()
    since()
    return since


def test_decision_by_uploaded_values_needs_no_wait(cuda, waits):
    limits, step = torch.tensor([1.0, 2.5, 4.0]).to(cuda), torch.tensor(3, device=cuda)
    assert bool(limits[1] == 2.5) and not bool((limits > step).all()) and bool((limits > step).any())
    assert (step * 2 + 1).item() == 7 and torch.cat([limits, limits])[4].item() == 2.5
    assert waits() == 0


def test_operand_is_read_in_place_of_the_comparison(cuda, waits):
    x = torch.full((100,), 0.5, device=cuda).exp().sum()
    assert bool(x > 100) and not bool(x > 200) and bool((x - 100).abs() < 100) and waits() == 1
    assert x.item() == torch.full((100,), 0.5).exp().sum().item() and waits() == 0


def test_two_operands_are_read_with_one_wait(cuda, waits):
    x, y = [torch.full((n,), 0.5, device=cuda).exp().sum() for n in (10, 20)]
    link = attached_links()[0]
    programs = current_devices().recorders[0].programs
    assert bool(x < y) and current_devices().recorders[0].programs == programs + 1
    assert x.item() < y.item() and waits() == 2 and not link.has_fetches


def test_value_of_a_loop_that_is_never_known_is_rarely_searched(cuda, waits, monkeypatch):
    searches = 0
    resolve = host_values.Value.resolve

    def counted(*args):
        nonlocal searches
        searches += 1
        return resolve(*args)

    monkeypatch.setattr(host_values.Value, "resolve", counted)
    computed, uploaded = torch.full((1000,), 0.5, device=cuda).exp(), torch.full((1000,), 2.0).to(cuda)

    def turn(y):
        torch.cuda.synchronize()
        return (y > 1).sum().item()  # the same program, whether `y` is known here or not

    assert [turn(computed) for _ in range(100)] == [1000] * 100
    assert searches < 20
    waits()
    assert [turn(uploaded) for _ in range(32)] == [1000] * 32
    assert waits() < 32 + 16  # the synchronisations, and a few reads before it was searched again


def test_write_makes_a_value_unknown(cuda, waits):
    x = torch.tensor([1.0, 2.0]).to(cuda)
    x.exp_()
    assert x[0].item() == torch.tensor(1.0).exp().item() and waits() == 1
    assert x[1].item() == torch.tensor(2.0).exp().item() and waits() == 0  # all of a small storage is read
    x[0] = 5
    assert x.tolist() == [5, torch.tensor(2.0).exp().item()]


def test_value_before_a_write_is_computed_from_what_was_there(cuda, waits):
    x = torch.tensor(3).to(cuda)
    y = x * 2
    x.add_(1)
    assert (y.item(), x.item()) == (6, 4) and waits() == 0
    x.zero_()
    assert (y.item(), x.item()) == (6, 0)


def test_counter_on_the_device_needs_no_wait(cuda, waits):
    step = torch.zeros((), dtype=torch.int64, device=cuda)
    torch.cuda.synchronize()
    assert step.item() == 0
    waits()
    for k in range(1, 300):  # more than one program
        step += 1
        assert step.item() == k
    assert waits() == 0
    torch.cuda.synchronize()
    assert step.clone().cpu().item() == 299


def test_number_of_a_small_tensor_that_is_changed_in_place_needs_no_wait(cuda, waits):
    counts = torch.zeros(4, dtype=torch.int64).to(cuda)
    for k in range(1, 300):
        counts += 1
        assert counts[k % 4].item() == k
    assert waits() == 0
    counts[1] = 7
    assert (counts[1].item(), counts.tolist()) == (7, [299, 7, 299, 299])
    torch.cuda.synchronize()
    assert counts.clone().cpu().tolist() == [299, 7, 299, 299]


def test_value_that_was_computed_before_two_writes(cuda, waits):
    x = torch.tensor([1.0, 2.0]).to(cuda)
    assert x.tolist() == [1, 2]
    y = x * 3
    x.mul_(2)
    z = x + 1
    assert z.tolist() == [3, 5]  # keeps a copy of z, not of x
    x.exp_()
    assert y.tolist() == [3, 6] and z.tolist() == [3, 5] and waits() == 0
    assert x.tolist() == torch.tensor([2.0, 4.0]).exp().tolist()


def test_freed_operand_is_not_read(cuda, waits):
    x = torch.full((9,), 0.25, device=cuda).exp().sum()
    y = x * 2
    del x
    assert y.item() == torch.full((9,), 0.25).exp().sum().item() * 2 and waits() == 1
    x = torch.full((9,), 0.5, device=cuda).exp().sum()
    y = x * 2
    torch.cuda.synchronize()
    recorder = current_devices().recorders[0]
    with recorder.lock:
        recorder.sync()
    del x
    assert y.item() == torch.full((9,), 0.5).exp().sum().item() * 2


def test_value_of_the_program_that_was_sent_last_is_computed(cuda, waits):
    recorder = current_devices().recorders[0]
    x = torch.tensor([4, 7]).to(cuda)
    with recorder.lock:
        y = x + 1
        recorder.flush()
        assert y.tolist() == [5, 8] and waits() == 0
        z = y * 2
        recorder.flush()
    torch.arange(3.0).to(cuda)  # an upload is no instruction, so the programs before it are not searched
    assert z.tolist() == [10, 16]


def test_small_result_whose_shape_depends_on_data_comes_with_its_shape(cuda, waits):
    x = torch.arange(6.0, device=cuda).exp()
    found = (x > 10).nonzero()
    waits()
    assert found.tolist() == [[3], [4], [5]] and [int(i) for i in found] == [3, 4, 5] and waits() == 0


def test_shape_that_depends_on_known_data_needs_no_wait(cuda, waits):
    x = torch.tensor([3, 0, 3, 5]).to(cuda)
    recorder = current_devices().recorders[0]
    syncs = recorder.require_link().answered
    assert x.nonzero().flatten().tolist() == [0, 2, 3] and x[x > 2].tolist() == [3, 3, 5]
    assert torch.unique(x).tolist() == [0, 3, 5]
    assert x.repeat_interleave(x)[-1].item() == 5
    assert recorder.require_link().answered == syncs and waits() == 0
    x += torch.ones(4, device=cuda).exp().long()
    assert x.nonzero().numel() == 4


def test_copy_to_pinned_memory_has_arrived_after_a_read_without_wait(cuda):
    x, known = torch.ones(4, device=cuda).exp(), torch.tensor([1, 2]).to(cuda)
    host = torch.zeros(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert known.tolist() == [1, 2]
    assert torch.equal(host, torch.ones(4).exp())


def test_number_beside_half_precision_is_left_to_the_device(cuda, waits):
    """Devices round the number to 16 bits or keep 32 of them."""
    x = torch.tensor([0.1], dtype=torch.float16).to(cuda)
    assert bool((x == 0.1)[0]) == bool((torch.tensor([0.1], dtype=torch.float16) == 0.1)[0]) and waits() > 0


def test_zero_whose_sign_may_differ_between_devices_is_left_to_the_device(cuda, waits):
    x, y = torch.tensor([-0.0]).to(cuda), torch.tensor([0.0]).to(cuda)
    assert torch.maximum(x, y).tolist() == [0.0] and waits() > 0


def test_error_of_an_operand_is_raised(cuda):
    table = torch.ones(3, 2, device=cuda)
    wrong = torch.nn.functional.embedding(torch.tensor([7]).to(cuda), table).sum()
    with pytest.raises(RuntimeError, match="index out of range"):
        bool(wrong > 0)


def test_host_copy_does_not_follow_the_tensor_that_was_uploaded(cuda):
    host = torch.tensor([1, 2])
    x = host.to(cuda)
    host[0] = 9
    read = x.cpu()
    read[1] = 9
    assert x.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("part", "elements"),
    [
        ((0, torch.int64, (2,), (1,)), [0, 1]),
        ((16, torch.int64, (2,), (2,)), [2, 4]),
        ((40, torch.int64, (), ()), 5),
        ((40, torch.int64, (2,), (1,)), None),
        ((4, torch.int64, (1,), (1,)), None),
        ((0, torch.int32, (1,), (1,)), None),
        ((8, torch.int64, (2, 2), (0, 1)), [[1, 2], [1, 2]]),
        ((0, torch.int64, (0,), (1,)), None),
    ],
)
def test_part_of_a_host_copy(part, elements):
    found = part_of(torch.arange(6), (0, torch.int64, (6,), (1,)), part)
    assert (None if found is None else found.tolist()) == elements


# -- equal to the CPU, whatever the script does --------------------------------------------------------------------------

VALUES = st.sampled_from(
    [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16]
)
STEPS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 5), st.integers(-3, 3)), min_size=4, max_size=30
)


def script(steps, dtypes, device):
    """A script of small operations on a pool of tensors. Returns all values that it reads."""
    generator = torch.Generator().manual_seed(1)
    pool = [
        (torch.randn(4, generator=generator) * 3).to(dtype).to(device)
        if k % 2
        else torch.tensor(k).to(dtype).to(device)
        for k, dtype in enumerate(dtypes)
    ]
    read = []
    for what, i, j, number in steps:
        try:
            step(pool, read, what, i % len(pool), j % len(pool), number)
        except RuntimeError as e:  # the CPU refuses it, too
            read.append(str(e).split(";")[0][:40])
    return repr(read + [t.tolist() for t in pool])


def step(pool, read, what, i, j, number):
    """One operation: it reads, writes one tensor, or replaces the tensor `j`."""
    a, b = pool[i], pool[j]
    match what:
        case 0:
            new = a > b
        case 1:
            new = a + b
        case 2:
            new = a * number
        case 3:
            new = torch.where(a > number, a, b.to(a.dtype))
        case 4:
            new = torch.cat([a.reshape(-1), b.reshape(-1)])[-4:]
        case 5:
            new = (a.to(torch.int64) * 2).sum()
        case 6:
            new = a.reshape(-1)[:2].to(torch.float32).exp()
        case 7:
            a.copy_(b.reshape(-1)[0])
            return
        case 8:
            a.fill_(number % 2)
            return
        case 9:
            a.reshape(-1)[:1].add_(b.reshape(-1)[:1].to(a.dtype))
            return
        case 10:
            new = a.reshape(-1)[::2].clone()
        case 11:
            new = torch.maximum(a.to(torch.float32), b.to(torch.float32)) / 4
        case 12:
            new = a.to(torch.float64).sqrt() - b.to(torch.float64)
        case 13:
            read.append(a.reshape(-1)[0].item())
            return
        case 14:
            read.append(a.tolist())
            return
        case 15:
            read.append(bool((a == b).any()))
            return
        case 16:
            read.append((a > number).nonzero().tolist())
            return
        case 17:
            new = a.reshape(-1)[a.reshape(-1) > number]
            read.append(new.shape)
            if not new.numel():
                return
        case 18:
            pool[i] = b.t().contiguous() if b.dim() == 2 else b.clone()
            return
        case 19:
            new = torch.isin(a.to(torch.int64), b.to(torch.int64)).logical_not()
        case _:
            a.reshape(-1)[-1:].copy_(torch.tensor([number]).to(a.dtype))
            return
    if new.dim() > 1 or new.numel() not in (1, 2, 4):
        new = new.reshape(-1)[:1]
    if new.numel() == 2:
        new = torch.cat([new, new])
    pool[j] = new


@given(steps=STEPS, dtypes=st.lists(VALUES, min_size=2, max_size=6))
def test_small_values_are_those_of_the_cpu(cuda, steps, dtypes):
    assert script(steps, dtypes, cuda) == script(steps, dtypes, "cpu")


def test_masks_of_one_small_value_need_one_wait(cuda, waits):
    experts, tokens = torch.tensor([0, 2, 1, 2, 0, 0]), torch.randn(6, 4)
    there, x = experts.to(cuda).float().exp().log().round().long(), tokens.to(cuda)
    torch.cuda.synchronize()
    waits()
    for k in range(4):
        (rows,) = torch.where(there == k)
        assert rows.tolist() == torch.where(experts == k)[0].tolist()
        assert torch.equal(x[there == k].cpu(), tokens[experts == k])
    assert waits() == 1


def test_result_whose_shape_depends_on_a_small_mask_is_recorded_as_other_results(cuda, waits):
    t, mask = torch.randn(5, 3), torch.tensor([True, False, True, True, False])
    x, there = t.to(cuda), mask.to(cuda).float().exp().log().round().bool()
    torch.cuda.synchronize()
    waits()
    for select in (
        lambda t, mask: t[mask],
        lambda t, mask: t[mask] * t[~mask].sum(),
        lambda t, mask: t[:, 1].masked_select(mask),
        lambda t, mask: t.masked_select(mask[:, None]),
        lambda t, mask: t[:, :1].masked_select(mask),
        lambda t, mask: mask.nonzero(),
        lambda t, mask: mask.long().unique(),
        lambda t, mask: torch.bincount(mask.long()),
        lambda t, mask: t.repeat_interleave(mask.long(), 0),
    ):
        found = select(x, there)
        assert waits() <= 1  # the mask, once
        assert torch.equal(found.cpu(), select(t, mask))
        waits()


def test_large_mask_is_not_read(cuda):
    x = torch.randn(300, 300, device=cuda)
    link = attached_links()[0]
    before = link.bytes_received
    assert x[x > 9].numel() == 0 and x.masked_select(x > 9).numel() == 0 and (x > 9).nonzero().numel() == 0
    assert link.bytes_received - before < 2000


def test_weights_of_counts_are_not_read_in_vain(cuda, waits):
    there, weights = [t.to(cuda).float().exp().log().round() for t in (torch.tensor([0, 2, 2]), torch.ones(3))]
    torch.cuda.synchronize()
    waits()
    assert torch.bincount(there.long(), weights).shape == (3,) and waits() == 1


def test_ranges_of_integers_and_what_is_computed_from_them_need_no_wait(cuda, waits):
    for where in ("cpu", cuda):
        places = torch.arange(16, device=where).unsqueeze(0)
        packed = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        assert (packed[:, -1] == 0).all() and torch.arange(9, 2, -3, device=where).tolist() == [9, 6, 3]
        assert torch.arange(3, dtype=torch.uint8, device=where)[2] == 2
    assert waits() == 0
    assert torch.arange(0, 1, 0.1, device=cuda).tolist() == torch.arange(0, 1, 0.1).tolist() and waits() == 1


def test_operand_of_a_computed_value_is_known_from_then_on(cuda, waits):
    """As in the steps of a scheduler: a comparison with the last time, then the last time as an index."""
    times, table = torch.tensor([900, 600, 300]).to(cuda), torch.rand(1000)
    x = torch.randn(5, device=cuda)
    recorder = current_devices().recorders[0]
    with recorder.lock:  # the timer sends nothing meanwhile
        for time, expected in zip(times, (600, 300, 0), strict=True):
            last = time - 300
            x = (x.sin() + x.cos()).tanh()  # so the last instruction computes something else
            assert last >= 0
            recorder.flush()
            assert table[last] == table[expected]
    assert waits() == 0


def test_counter_behind_other_work_is_computed_here(cuda, waits):
    count = torch.tensor(3).to(cuda)
    more = count + 4
    x = torch.randn(5, device=cuda)
    for _ in range(5):
        x = (x.sin() + x.cos()).tanh()
    assert more.item() == 7 and waits() == 0
