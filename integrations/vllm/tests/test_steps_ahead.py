"""How many steps are under way over a distant link. These tests need no vLLM: `test_generate.py` has a real engine."""

from collections import deque
from types import SimpleNamespace

import pytest
from wooly_vllm import steps_ahead
from wooly_vllm.steps_ahead import MOST, NEAR, StepsAhead


class Clock:
    """Seconds that only the test lets pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(trip_s, *steps_s, steps=400, client_s=0.0005):
    """Let a client send steps to a device, as many as wanted: first `steps` of the first duration, then of the others.

    Returns the number under way at the end, and the time per late step.
    """
    clock = Clock()
    ahead, answers, free, ends = StepsAhead(lambda: trip_s, clock), deque(), 0.0, []
    for step_s in [step_s for step_s in steps_s for _ in range(steps)]:
        while len(answers) < ahead.wanted():
            clock.now += client_s
            ahead.sent()
            free = max(free, clock.now + trip_s / 2) + step_s
            answers.append(free + trip_s / 2)
        clock.now = max(clock.now, answers.popleft())
        ahead.answered()
        ends.append(clock.now)
    return ahead.wanted(), (ends[-1] - ends[-101]) / 100


@pytest.mark.parametrize("trip_s", [0.005, 0.02, 0.08, 0.15])
@pytest.mark.parametrize("step_s", [0.004, 0.01, 0.03, 0.2])
def test_device_never_waits_for_a_distant_client(trip_s, step_s):
    wanted, period_s = run(trip_s, step_s)
    needed = trip_s / step_s
    if needed + NEAR + 1 < MOST:
        assert period_s == pytest.approx(step_s, rel=0.02)
    assert wanted <= needed + NEAR + 1


def test_near_device_has_the_steps_of_vllm():
    assert run(0.0005, 0.0001)[0] == NEAR


def test_number_of_steps_is_limited():
    assert run(1.0, 0.001)[0] == MOST


def test_slower_steps_need_fewer_under_way():
    assert run(0.08, 0.004)[0] >= 22 and run(0.08, 0.004, 0.04)[0] == run(0.08, 0.04)[0] <= 5
    assert run(0.08, 0.04, 0.004) == pytest.approx(run(0.08, 0.004))


def request(*, structured=False, tokens=0, placeholders=0, most=100):
    return SimpleNamespace(
        use_structured_output=structured,
        num_output_tokens=tokens,
        num_output_placeholders=placeholders,
        max_tokens=most,
    )


class Core:
    """An engine whose function adds a step to the queue, and waits for the oldest if it is full."""

    def __init__(self, *running, tokens=1, waiting=()):
        self.tokens = tokens
        self.batch_queue, self.batch_queue_size = deque(maxlen=NEAR), NEAR
        self.scheduler = Scheduler()
        self.scheduler.running, self.scheduler.waiting = list(running), list(waiting)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))

    def step(self):
        queue = self.batch_queue
        assert len(queue) < self.batch_queue_size
        if self.scheduler.has_requests():
            queue.appendleft((None, SimpleNamespace(total_num_scheduled_tokens=self.tokens), None))
            if len(queue) < self.batch_queue_size:
                return None
        return queue.pop()

    def steps_under_way(self, calls=40):
        for _ in range(calls):
            steps_ahead.step(self, Core.step)
        return len(self.batch_queue)


class Scheduler:
    def has_requests(self):
        return True


@pytest.fixture
def distant(monkeypatch):
    """Sessions whose link holds ten steps."""
    monkeypatch.setattr(steps_ahead, "supports", lambda config: True)
    monkeypatch.setattr(steps_ahead, "_of_session", lambda: StepsAhead(lambda: 0.08))
    monkeypatch.setattr(StepsAhead, "wanted", lambda self: 10)


def test_distant_engine_has_many_steps_under_way(distant):
    assert Core(request()).steps_under_way() == 9  # and one more inside the function


@pytest.mark.parametrize(
    "core",
    [
        Core(request(), request(structured=True)),
        Core(request(), tokens=65),
        Core(request(), tokens=0),
        Core(request(tokens=60, placeholders=40), request(tokens=10, placeholders=2, most=12)),
    ],
    ids=["structured output", "many tokens", "empty steps", "ends"],
)
def test_engine_that_needs_answers_has_the_steps_of_vllm(distant, core):
    assert core.steps_under_way() == 1


@pytest.mark.parametrize(
    "core", [Core(request(placeholders=100), waiting=[1]), Core(request(placeholders=100), request())]
)
def test_requests_that_do_not_end_yet_go_on(distant, core):
    assert core.steps_under_way() == 9


def test_steps_under_way_become_fewer_when_a_structured_output_comes(distant):
    core = Core(request())
    assert core.steps_under_way() == 9
    core.scheduler.running.append(request(structured=True))
    for left in range(8, 0, -1):
        steps_ahead.step(core, Core.step)
        assert len(core.batch_queue) == left
    assert core.steps_under_way() == 1 and core.scheduler.has_requests()


def test_engine_that_is_not_supported_is_vllms(monkeypatch):
    monkeypatch.setattr(steps_ahead, "supports", lambda config: False)
    assert Core(request()).steps_under_way() == 1


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"async_scheduling": False},
        {"use_v2_model_runner": False},
        {"speculative_config": object()},
        {"kv_transfer_config": object()},
        {"world_size": 2},
        {"data_parallel_size": 2},
        {"runner_type": "pooling"},
    ],
    ids=lambda changed: next(iter(changed), "plain"),
)
def test_only_servers_whose_steps_need_no_answer_are_supported(changed):
    plain = {
        "async_scheduling": True,
        "use_v2_model_runner": True,
        "speculative_config": None,
        "kv_transfer_config": None,
        "world_size": 1,
        "data_parallel_size": 1,
        "runner_type": "generate",
    }
    of = SimpleNamespace(**plain | changed)
    config = SimpleNamespace(
        scheduler_config=of,
        parallel_config=of,
        model_config=of,
        use_v2_model_runner=of.use_v2_model_runner,
        speculative_config=of.speculative_config,
        kv_transfer_config=of.kv_transfer_config,
    )
    assert steps_ahead.supports(config) == (not changed)
