"""Recording what a session sends, replaying it on other executors, and finding the first wrong instruction."""

import contextlib
import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from wooly import api, device
from wooly.recording.bundle import Bundle, BundleError, Line, WriteFrame
from wooly.recording.compare import Pair, compare, difference
from wooly.recording.programs import Decoded, Programs
from wooly.recording.record import begin
from wooly.recording.replay import Inputs, LineNotFoundError, Player, ReplayError, Stop, find_stop, replay
from wooly.recording.sessions import RuntimeMissingError, executor_with, session
from wooly.recording.tensors import live_tensors, statistics
from wooly.settings import Settings
from wooly_testkit.assembler import assemble
from wooly_testkit.executor import executor_process
from wooly_testkit.forks import Forked
from wooly_wis.codec import encode_program
from wooly_wis.frames import Run

HERE = Path(__file__)


def wrong(module, *arguments, env, **options):
    """Start the executor with a wrong operator."""
    return Forked("wrong_gelu", *arguments, like=module, env=env | {"PYTHONPATH": str(HERE.parent)}, **options)


@pytest.fixture(scope="module")
def there():
    """Settings of sessions at executors that no script uses: a right one, and one with a wrong operator."""
    with executor_process(start=Forked) as right, executor_process(start=wrong) as bad:
        urls = [x.endpoints[0].replace("unix://", f"unix://{x.token}@") for x in (right, bad)]
        yield SimpleNamespace(right=Settings(executor_url=urls[0]), wrong=Settings(executor_url=urls[1]))


@pytest.fixture
def record(cuda, tmp_path, monkeypatch):
    """Record what a function sends, as if its session began with it. The timer, which cuts programs where it likes, is off."""
    monkeypatch.setattr(device.current().devices.recorders[0], "try_flush", lambda: None)

    def record(work, *, data=True):
        recorder = device.current().devices.recorders[0]
        gc.collect()
        torch.cuda.synchronize()
        recorder._sent.clear()
        link = api.attached_links()[0]
        recording = begin(tmp_path / "b.wooly", link, "test", "exact", data=data, say=print)
        try:
            work()
            torch.cuda.synchronize()
        finally:
            link.log = None
            recording.end()
        return Bundle(tmp_path / "b.wooly")

    return record


@contextlib.contextmanager
def playing(bundle, settings, seed=0):
    """A player for a bundle in a new session."""
    programs = Programs(bundle)
    with session(settings, "exact") as link:
        yield programs, Player(bundle, programs, Inputs(bundle, programs, seed), link)


def replayed(bundle, settings, stop=None):
    with playing(bundle, settings) as (programs, player):
        return replay(bundle, programs, player, stop or Stop(bundle.frames))[0]


def tensors_at(bundle, settings, stop, seed=0):
    """The live tensors at a stop, by line of this file and operator."""
    with playing(bundle, settings, seed) as (programs, player):
        _, live = replay(bundle, programs, player, stop)
        live.find_views(stop.frame)
        found = list(live_tensors(live.by_id, player.link))
    return {(t.buffer.made and t.buffer.made.number, t.buffer.operator): t.tensor for t in found}


def line_with(mark):
    """The number of the line of this file that ends with a comment."""
    return next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f"# {mark}"))


def train():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4)).to("cuda")
    data, labels = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    embedding = nn.Embedding(4, 8).to("cuda")
    for _ in range(3):
        x, y = data.to("cuda"), labels.to("cuda")
        loss = nn.functional.cross_entropy(model(x + embedding(y)), y)  # forward
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
        loss.item()  # read
    torch.nonzero(x > 0)


@pytest.fixture
def training(record):
    with record(train) as bundle:
        yield bundle


def test_replay_on_another_executor_has_the_same_answers(training, there):
    found = replayed(training, there.right)
    assert (found.frames, found.differences, found.errors) == (training.frames, [], [])
    assert found.compared == len(training.answers) >= 4


def test_first_answer_that_differs_is_named_with_its_line(training, there):
    reads = [
        n
        for n, answer in training.answers.items()
        if training.lines_of(training.frame(n))[-1].number == line_with("read")
    ]
    for number in reads[1:]:
        training.answers[number] = bytes(32)
    found = replayed(training, there.right)
    assert [d.frame for d in found.differences] == reads[1:]
    assert str(found.differences[0].line) == f"{HERE}:{line_with('read')}"


def test_replay_on_an_executor_with_a_wrong_operator_differs(training, there):
    found = replayed(training, there.wrong)
    assert found.differences and found.differences[0].line.number == line_with("read")


def temporaries():
    x = torch.arange(6.0).to("cuda")
    for k in range(2):
        y = (x * 3 + k).relu().sum()  # chain
    y.item()


def test_until_a_line_stops_after_its_last_instruction(record, there):
    with record(temporaries) as bundle:
        stop = find_stop(bundle, f"{HERE.name}:{line_with('chain')}")
        found = tensors_at(bundle, there.right, stop)
        assert find_stop(bundle, str(HERE) + f":{line_with('chain')}") == stop
        early = tensors_at(bundle, there.right, Stop(stop.frame, 1))
    at = line_with("chain")
    assert found[at, "sum"].item() == (torch.arange(6.0) * 3 + 1).sum()
    assert not {key for key in early if key[1] == "sum"}


def test_until_a_frame_shows_the_tensors_after_it(record, there):
    with record(temporaries) as bundle:
        upload = next(f.number for f in bundle.all_frames() if isinstance(f, WriteFrame))
        found = tensors_at(bundle, there.right, Stop(upload))
        with pytest.raises(
            LineNotFoundError, match=f"there is no frame 999: the bundle has frames 1 to {bundle.frames}"
        ):
            find_stop(bundle, "999")
    assert torch.arange(6.0).equal(next(t for (_, operator), t in found.items() if operator == "upload"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("test_recording.py:1", "line 1 of test_recording.py made nothing in this recording; lines near it that did: "),
        ("test_recordings.py:7", "did you mean test_recording.py"),
        ("frame", "neither a number of a frame nor FILE:LINE"),
    ],
)
def test_until_unknown_place_names_close_ones(record, text, why):
    with record(temporaries) as bundle, pytest.raises(LineNotFoundError, match=why):
        find_stop(bundle, text)


def mistakes():
    x = torch.arange(4.0).to("cuda")
    with contextlib.suppress(RuntimeError):
        x.index_select(0, torch.tensor([9]).to("cuda")).sum().item()  # mistake
    with contextlib.suppress(RuntimeError):
        x.index_select(0, torch.tensor([8]).to("cuda"))
        torch.cuda.synchronize()
    (x + 1).sum().item()


def test_errors_of_the_script_are_repeated_and_are_no_differences(record, there):
    with record(mistakes) as bundle:
        found = replayed(bundle, there.right)
    assert not found.differences and not found.errors and len(found.repeated) == 2
    assert f"recorded at {HERE}:{line_with('mistake')} in mistakes" in found.repeated[0].what


def test_without_data_inputs_are_random_and_indices_valid(record, there):
    with record(train, data=False) as bundle:
        found = replayed(bundle, there.right)
        assert not found.errors and not found.differences and not found.compared
        stop = find_stop(bundle, f"{HERE.name}:{line_with('forward')}")
        one, same, other = [tensors_at(bundle, there.right, stop, seed) for seed in (0, 0, 1)]
    weights = [key for key, t in one.items() if t is not None and t.dtype is torch.float32 and t.dim() == 2]
    assert weights and all(one[k].equal(same[k]) for k in weights)
    assert any(not one[k].equal(other[k]) for k in weights)


def test_without_data_no_upload_becomes_a_param(record, tmp_path):
    with record(lambda: torch.tensor(1234.5).to("cuda").sum().item(), data=False):
        assert torch.tensor(1234.5).numpy().tobytes() not in (tmp_path / "b.wooly").read_bytes()
        assert torch.tensor(1234.5, dtype=torch.float64).numpy().tobytes() not in (tmp_path / "b.wooly").read_bytes()


def compared(bundle, one, two, tolerance=0.0):
    programs = Programs(bundle)
    inputs = Inputs(bundle, programs)

    @contextlib.contextmanager
    def open_pair():
        with session(one, "exact") as a, session(two, "exact") as b:
            yield Pair(*[Player(bundle, programs, inputs, link) for link in (a, b)], ("a", "b"))

    return compare(bundle, programs, open_pair, tolerance)


def network():
    torch.manual_seed(5)
    x = torch.randn(4, 8).to("cuda")
    for k in range(3):
        x = (x * 2 - k).tanh()
        if k == 1:
            x = nn.functional.gelu(x)  # wrong
    x.sum().item()


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_compare_names_the_line_of_the_wrong_operator(record, there, tolerance):
    with record(network) as bundle:
        found = compared(bundle, there.right, there.wrong, tolerance)
    culprit = found.culprit
    assert (culprit.line, culprit.operator) == (Line(str(HERE), line_with("wrong"), "network"), "gelu")
    assert culprit.operands == ["in f32[4,8]", "out f32[4,8]"] and culprit.names == ("a", "b")
    assert culprit.gap.at == [0, 0] and culprit.gap.largest == pytest.approx(0.25, abs=1e-3)


def test_compare_accepts_what_the_tolerance_allows(record, there):
    with record(network) as bundle:
        found = compared(bundle, there.right, there.wrong, tolerance=0.5)
    assert found.culprit is None and found.rounded == 1 and found.accumulated == 0


def test_compare_of_equal_executors_finds_nothing(training, there):
    found = compared(training, there.right, there.right)
    assert (found.culprit, found.rounded, found.frames) == (None, 0, training.frames)


def test_compare_of_rounding_that_adds_up_names_no_instruction(record, there):
    """Each instruction is within the tolerance, but the run is not: the wrong element is multiplied afterwards."""

    def work():
        x = torch.full((4,), 0.5).to("cuda")
        y = (nn.functional.gelu(x) * 100 - 45).tanh()
        y.sum().item()

    with record(work) as bundle:
        found = compared(bundle, there.right, there.wrong, tolerance=0.75)
    assert found.culprit is None and found.accumulated == 1


def test_compare_names_an_error_of_one_executor(record, there):
    with record(lambda: torch.randn(3).to("cuda").cumsum(0).sum().item()) as bundle:
        programs = Programs(bundle)
        inputs = Inputs(bundle, programs)

        class Failing(Player):
            def run(self, raw, names, bindings, *more, **options):
                if "aten.cumsum.default" in names:
                    bindings = [b + 8000 for b in bindings]  # buffers that do not exist
                return super().run(raw, names, bindings, *more, **options)

        @contextlib.contextmanager
        def open_pair():
            with session(there.right, "exact") as a, session(there.right, "exact") as b:
                yield Pair(Player(bundle, programs, inputs, a), Failing(bundle, programs, inputs, b), ("a", "b"))

        culprit = compare(bundle, programs, open_pair, tolerance=0.1).culprit
    assert "cumsum" in culprit.operator and culprit.gap.values[0] == "no error"


def test_difference_counts_elements_and_finds_the_largest():
    one, two = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.5], [3.0, 3.0]])
    gap = difference(one, two)
    assert (gap.largest, gap.scale, gap.at, gap.values, gap.count, gap.of) == (1.0, 4.0, [1, 1], (4.0, 3.0), 2, 4)
    assert gap.within(0.25) and not gap.within(0.2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint64, torch.uint16, torch.uint8])
def test_difference_of_integers_is_never_within_a_tolerance(dtype):
    gap = difference(torch.tensor([0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype))
    assert gap.count == 1 and not gap.within(1e9)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.float64])
def test_difference_of_nan_and_signed_zeros(dtype):
    one = torch.tensor([0.0, float("nan"), 1.0]).to(dtype)
    assert difference(one, torch.tensor([-0.0, float("nan"), 1.0]).to(dtype)) is None
    gap = difference(one, torch.tensor([0.0, 0.0, 1.0]).to(dtype))
    assert gap.at == [1] and not gap.within(1e9)


def test_piece_keeps_slots_and_params():
    program = assemble(
        "wis 1\n%0 u8[16] = alloc\n%0 f32[4] = fill<f64> {value=$0}\n%2 f32[4] = copy %1 f32[4]\n"
        "%0 f32[4] = fill<f64> {value=$0}\nfree %1\n"
    )
    decoded = Decoded(encode_program(program))
    run = Run(decoded.digest, [10, 11, 12], b"1234567887654321", [], False)
    pieces = [decoded.piece(k, k + 1) for k in range(5)]
    assert [p.bindings(run) for p in pieces] == [[10], [10], [11, 12], [10], [11]]
    assert [p.params(run) for p in pieces] == [b"", b"12345678", b"", b"87654321", b""]
    assert Decoded(decoded.piece(0, 2).raw).program.body == program.body[:2]


def test_statistics_of_special_numbers():
    assert statistics(torch.tensor([1.0, float("nan"), 3.0])) == {
        "min": 1.0,
        "max": 3.0,
        "mean": 2.0,
        "nan": 1,
        "inf": 0,
    }
    assert statistics(torch.empty(0))["min"] is None
    assert statistics(torch.tensor([True, False]))["mean"] == 0.5
    assert statistics(torch.tensor([3 + 4j]))["max"] == 5.0


def test_a_session_with_several_devices_is_not_recorded(tmp_path):
    link = SimpleNamespace(siblings=[object()])
    with pytest.raises(BundleError, match="has 2 devices, and only sessions with one device"):
        begin(tmp_path / "b", link, "x.py", "exact", data=True, say=print)


@pytest.mark.parametrize(("change", "why"), [({"protocol": 9}, "protocol 9"), ({"torch": "1.2.0"}, "PyTorch 1.2.0")])
def test_a_bundle_of_another_release_is_refused(record, there, change, why):
    with record(lambda: torch.ones(2, device="cuda").sum().item()) as bundle:
        bundle.facts |= change
        with pytest.raises(ReplayError, match=why), playing(bundle, there.right):
            pass


@pytest.mark.slow  # a process that imports torch
def test_a_runtime_that_is_not_there_says_why():
    settings = Settings(executor_url="unix://t@/nowhere")
    why = "an executor with the runtime hip does not start here"
    with pytest.raises(RuntimeMissingError, match=why), executor_with("hip", settings):
        pass


def test_the_loss_of_the_executor_names_the_frames(record, there):
    with record(temporaries) as bundle, playing(bundle, there.right) as (programs, player):
        lost = partial(player.link.fail, "its process ended")
        with pytest.raises(ReplayError, match=r"its process ended[\s\S]*was lost (after|between) frame"):
            replay(bundle, programs, player, Stop(bundle.frames), lambda frame: lost() if frame == 2 else None)
