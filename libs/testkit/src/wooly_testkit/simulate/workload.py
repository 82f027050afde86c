"""Workloads of tenants: kernel sequences (from a profile file, or synthetic) and arrival times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

from wooly_dispatch.events import Policy


@dataclass(frozen=True, slots=True)
class Profile:
    """The kernel durations of one request or training step, in ns."""

    name: str
    kernels: tuple[int, ...]

    @property
    def total_ns(self) -> int:
        return sum(self.kernels)

    @property
    def longest_ns(self) -> int:
        return max(self.kernels)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant of a simulated device.

    Attributes:
        id: name of the tenant.
        policy: policy of its session.
        profile: kernels of each program.
        interval_ns: mean time between requests (Poisson). Without `interval_ns`, `think_ns` and `trace`, the tenant saturates the
            device: more programs are always queued than a window holds.
        think_ns: alternative to `interval_ns`: mean pause (exponential) from an answer to the next request, one at a time.
        trace: alternative to `interval_ns`: arrival times in ns.
        noise_permille: largest deviation of the kernel durations from the estimate (uniform, one draw per program).
        understated: factor by which the estimates of the tenant are too low.
    """

    id: str
    policy: Policy
    profile: Profile
    interval_ns: int = 0
    think_ns: int = 0
    trace: tuple[int, ...] = ()
    noise_permille: int = 20
    understated: int = 1

    @property
    def saturating(self) -> bool:
        return not (self.interval_ns or self.think_ns or self.trace)

    def arrivals(self, seed: str) -> Iterator[int]:
        """Arrival times of requests in ns, ascending. Without end, unless the tenant has a trace."""
        yield from sorted(self.trace)
        if not self.interval_ns:
            return
        stream = Random(f"{seed}/{self.id}/arrivals")
        at = 0
        while True:
            at += int(stream.expovariate(1) * self.interval_ns) + 1
            yield at

    def pauses(self, seed: str) -> Iterator[int]:
        """Pauses before the requests, in ns."""
        stream = Random(f"{seed}/{self.id}/pauses")
        while True:
            yield int(stream.expovariate(1) * self.think_ns) + 1

    def durations(self, seed: str) -> Iterator[int]:
        """Actual duration of program 1, 2, 3, … relative to the profile, in permille."""
        stream = Random(f"{seed}/{self.id}/noise")
        while True:
            yield 1000 + (stream.randrange(-self.noise_permille, self.noise_permille + 1) if self.noise_permille else 0)


def read_profiles(path: Path) -> list[Profile]:
    """Read the models of a profile file (JSON, schema `profiles/1`), which lists each operator as [us, …].

    Raises:
        ValueError: the file has another schema or unit.
    """
    content = json.loads(path.read_text())
    if content.get("schema") != "profiles/1" or content.get("duration_unit") != "us":
        raise ValueError(f"{path} must have the schema profiles/1 and the duration_unit us")
    return [
        Profile(name, tuple(max(round(kernel[0] * 1000), 1) for kernel in model["seq"]))
        for name, model in content["models"].items()
    ]


def read_tenants(path: Path, profiles: list[Profile]) -> list[Tenant]:
    """Read the tenants of one device from a JSON list.

    Each entry has `id`, `profile` (a name in `profiles`), fields of `Policy`, and at most one of `trace` (ns), `interval_ns` and
    `think_ns`. Without these, the tenant saturates the device. `noise_permille` and `understated` are optional.

    Raises:
        ValueError: an entry has unknown fields, or its profile does not exist.
    """
    known = {profile.name: profile for profile in profiles}
    terms = {f.name for f in fields(Policy)}
    found = []
    for entry in json.loads(path.read_text()):
        try:
            policy = Policy(**{name: value for name, value in entry.items() if name in terms})
            rest = {name: value for name, value in entry.items() if name not in terms}
            rest["profile"] = known[rest["profile"]]
            rest["trace"] = tuple(rest.get("trace", ()))
            found.append(Tenant(policy=policy, **rest))
        except (TypeError, KeyError) as e:
            raise ValueError(f"{path}: {entry.get('id', entry)}: {e}; existing profiles: {', '.join(known)}") from e
    return found


_SYNTHETIC = {
    # name: kernels, median us, spread (sigma of the logarithm), longest us
    "small_infer": (150, 10, 0.8, 60),
    "convnet_infer": (180, 14, 1.2, 380),
    "encoder_infer": (560, 45, 1.0, 520),
    "detector_infer": (900, 8, 2.0, 30_000),
    "convnet_train": (900, 20, 1.6, 1_300),
    "encoder_train": (2400, 12, 1.4, 1_100),
    "sparse_train": (1500, 8, 1.8, 2_500),
}


def synthetic_profiles(seed: int = 0) -> list[Profile]:
    """Synthetic models with many short and few long kernels, as real models have."""
    found = []
    for name, (count, median, spread, longest) in _SYNTHETIC.items():
        stream = Random(f"{seed}/{name}")
        kernels = [min(stream.lognormvariate(0, spread) * median, longest) for _ in range(count)]
        found.append(Profile(name, tuple(max(round(us * 1000), 1000) for us in kernels)))
    return found


def is_inference(profile: Profile) -> bool:
    """Whether a profile is an inference request, by its name. Other profiles are training steps."""
    return "infer" in profile.name


def mix(profiles: list[Profile], count: int, load_permille: int, seed: str) -> list[Tenant]:
    """Tenants for one device with a total load of `load_permille`. One in five is P0 or P1 inference; the others are P2 to P4.

    Each tenant has the same share of the load. Arrivals are Poisson processes.
    """
    stream = Random(f"{seed}/mix")
    inference = [p for p in profiles if is_inference(p) and p.total_ns < 50_000_000] or profiles
    tenants = []
    for n in range(count):
        front = n % 5 == 0
        profile = stream.choice(inference if front else profiles)
        priority = (n // 5) % 2 if front else 2 + n % 3
        policy = Policy(
            priority=priority,
            weight=1 + n % 3,
            service_ns=profile.total_ns if front else 0,
            objective_ns=3 * profile.total_ns if front else 0,
        )
        interval = profile.total_ns * count * 1000 // load_permille
        tenants.append(Tenant(f"t{n:05d}", policy, profile, interval_ns=interval))
    return tenants
