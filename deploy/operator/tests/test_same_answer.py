"""The operator's labels and the controller's placement give the same answer about the same cluster."""

from hypothesis import given
from hypothesis import strategies as st
from wooly_operator.core import pods
from wooly_operator.core.fleet import DeviceRoom, FleetDevice, Limits, Pod, room_on
from wooly_operator.core.plan import inventory
from wooly_router.core.placement import Claim, DeviceRequest, Gpu, Pool
from wooly_router.core.placement import room_on as room_of

MIB = 1 << 20
SIZES = st.integers(1, 64).map(lambda n: n * MIB)
GROUPS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=2, unique=True).map(tuple)
CLAIMS = st.builds(Claim, st.sampled_from(["d0", "d1", "d2"]), st.none() | SIZES, st.booleans(), st.booleans())


@st.composite
def clusters(draw):
    """A node of 1 to 3 devices with claims, as the controller has it."""
    state = draw(st.sampled_from(["active", "active", "active", "cordoned", "draining"]))
    groups, overcommit = frozenset(draw(GROUPS)), draw(st.sampled_from([0, 20, 100]))
    names = [f"d{i}" for i in range(draw(st.integers(1, 3)))]
    gpus = [Gpu(name, "n", draw(SIZES), groups=groups, overcommit=overcommit, state=state) for name in names]
    return Pool(gpus, draw(st.lists(CLAIMS, max_size=5)))


REQUESTS = st.builds(
    pods.PodRequest,
    vram=st.none() | SIZES,
    exclusive=st.none() | st.booleans(),
    swap=st.none() | st.booleans(),
    node_groups=GROUPS,
)


def devices_of(pool):
    """The devices as the operator reads them from the controller's REST."""
    found = []
    for gpu in pool.gpus():
        load = pool.load(gpu.executor_id)
        room = room_of(gpu, load)
        said = DeviceRoom(room.takes, room.takes_exclusive, room.swappable, room.fixed)
        figures = {"sessions": load.sessions, "fixed": load.fixed, "promised": load.fixed + load.movable}
        groups = tuple(sorted(gpu.groups))
        found.append(FleetDevice(gpu.executor_id, gpu.node, gpu.total, groups=groups, room=said, **figures))
    return found


def matches(labels, expression):
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "Gt":
            return value is not None and int(value) > int(expression["values"][0])
        case "DoesNotExist":
            return value is None


def operator_admits(pool, request, claim, there=()):
    devices = devices_of(pool)
    percent = pool.gpus()[0].overcommit
    labels = inventory(devices, room_on(devices, there, percent), Limits(), ())
    return any(all(matches(labels, e) for e in terms) for terms in pods.placement_terms(request, claim))


def want_of(request, claim):
    return DeviceRequest(
        required_vram=request.vram,
        exclusive=bool(request.exclusive),
        swappable=request.swap is not False,
        groups=request.node_groups,
        node="n",
        claim=claim,
    )


@given(clusters(), REQUESTS, st.just(0) | SIZES)
def test_operator_admits_a_pod_exactly_if_the_controller_places_its_session(pool, request, claim):
    assert operator_admits(pool, request, claim) == bool(pool.place(want_of(request, claim)).gpus)


@given(clusters(), st.lists(REQUESTS, min_size=1, max_size=5), st.integers(0, 5), st.just(0) | SIZES)
def test_operator_admits_no_pod_that_the_controller_would_refuse_after_the_pods_before_it(
    pool, requests, opened, claim
):
    """The sessions of the first pods are open; those of the others will be, before the last pod's."""
    there = []
    for number, request in enumerate(requests):
        admitted = operator_admits(pool, request, claim, there)
        placed = pool.place(want_of(request, claim)).gpus
        if admitted and number <= opened:
            assert placed
        if not placed or not admitted:
            continue
        want = want_of(request, claim)
        there.append(Pod(f"p{number}", "n", want.asked or None, want.exclusive, want.swappable))
        if number < opened:
            pool.claim(Claim(placed[0].executor_id, want.asked or None, want.exclusive, want.swappable))
