"""The studies of the simulator: pairs of models on one device, shares of two tenants, given tenants, and whole clusters.

Rows are plain dicts with names, integers (permille, ns) and rounded ratios. The result of a device depends only on the seed and
its number, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any, TypeVar

from wooly_dispatch.events import Config, Policy

from wooly_testkit.simulate.device import DeviceResult, SimulatedDevice, quantile
from wooly_testkit.simulate.workload import Profile, Tenant, is_inference, mix

Row = dict[str, Any]
J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all studies."""

    seconds: float = 10.0
    seed: int = 0
    processes: int = 1
    policies: tuple[str, ...] = ("wooly",)
    audit: bool = False
    config: Config = field(default_factory=Config)

    @property
    def wall_ns(self) -> int:
        return int(self.seconds * 1e9)


def _spread(jobs: Iterable[J], work: Callable[[J], R], processes: int) -> list[R]:
    if processes <= 1:
        return [work(job) for job in jobs]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, jobs))


# -- one P0 beside saturating tenants ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pair:
    front: Profile
    background: Profile
    count: int
    options: Options
    policy: str


def pairs(profiles: list[Profile], options: Options, background: int = 1) -> list[Row]:
    """Run each inference model as a P0 tenant beside `background` saturating P4 tenants.

    The P0 tenant sends one request at a time, and pauses as long as a request takes. A row has the p50 and p99 of its response
    time, relative to the device without other tenants, and `reclaimed`: GPU time of the background over the time that P0 left.
    """
    fronts = [p for p in profiles if is_inference(p)]
    jobs = [_Pair(f, b, background, options, policy) for policy in options.policies for f in fronts for b in profiles]
    return _spread(jobs, _pair, options.processes)


def _pair(job: _Pair) -> Row:
    front = Tenant("front", Policy(0, service_ns=job.front.total_ns), job.front, think_ns=job.front.total_ns)
    behind = [Tenant(f"behind{n}", Policy(4), job.background) for n in range(job.count)]
    options = job.options
    device = SimulatedDevice([front, *behind], job.policy, f"{options.seed}", options.config, options.audit)
    result = device.run(options.wall_ns)
    outcome = result.outcomes["front"]
    left = max(result.wall_ns - outcome.run_ns, 1)
    row = {
        "policy": job.policy,
        "front": job.front.name,
        "background": job.background.name,
        "longest_share": round(job.background.longest_ns / job.front.total_ns, 4),
        "requests": outcome.programs,
        "p50": _ratio(outcome.responses, outcome.alone, 500),
        "p99": _ratio(outcome.responses, outcome.alone, 990),
        "reclaimed": round(sum(result.outcomes[t.id].run_ns for t in behind) / left, 4),
        "utilization": round(result.run_ns / result.wall_ns, 4),
        "launches": result.launches,
    }
    return row | _audited(result, device)


def _ratio(ours: list[int], alone: list[int], permille: int) -> float:
    base = quantile(alone, permille)
    return round(quantile(ours, permille) / base, 4) if base else 0.0


def _audited(result: DeviceResult, device: SimulatedDevice) -> Row:
    if device.auditor is None or result.metrics is None:
        return {}
    return {
        "violations": result.violations,
        "unjust_ns": result.metrics.unjust_ns,
        "worst_inversion": device.auditor.worst_inversion_permille / 1000,
        "worst_unfairness": device.auditor.worst_unfairness_permille / 1000,
    }


# -- two saturating tenants --------------------------------------------------------------------------------------------


def shares(profiles: list[Profile], options: Options, weights: tuple[int, int] = (1, 1)) -> list[Row]:
    """Run each two models as saturating P2 tenants with these weights. `share_error` is the error of the first tenant's share."""
    found = [(a, b) for n, a in enumerate(profiles) for b in profiles[n:]]
    jobs = [(a, b, weights, options, policy) for policy in options.policies for a, b in found]
    return _spread(jobs, _shares, options.processes)


def _shares(job: tuple[Profile, Profile, tuple[int, int], Options, str]) -> Row:
    a, b, weights, options, policy = job
    tenants = [Tenant(name, Policy(2, w), p) for name, w, p in (("a", weights[0], a), ("b", weights[1], b))]
    device = SimulatedDevice(tenants, policy, f"{options.seed}", options.config, options.audit)
    result = device.run(options.wall_ns)
    share = result.outcomes["a"].run_ns / max(result.run_ns, 1)
    row = {
        "policy": policy,
        "first": a.name,
        "second": b.name,
        "weights": f"{weights[0]}:{weights[1]}",
        "share": round(share, 4),
        "share_error": round(abs(share - weights[0] / sum(weights)), 4),
        "utilization": round(result.run_ns / result.wall_ns, 4),
        "launches": result.launches,
    }
    return row | _audited(result, device)


# -- given tenants -----------------------------------------------------------------------------------------------------


def device(tenants: list[Tenant], options: Options) -> list[Row]:
    """Run these tenants on one device. There is one row per policy and tenant; responses are relative to the tenant alone."""
    rows = []
    for policy in options.policies:
        simulated = SimulatedDevice(tenants, policy, f"{options.seed}", options.config, options.audit)
        result = simulated.run(options.wall_ns)
        for tenant in tenants:
            outcome = result.outcomes[tenant.id]
            row = {
                "policy": policy,
                "tenant": tenant.id,
                "class": f"P{tenant.policy.priority}",
                "programs": outcome.programs,
                "p50": _ratio(outcome.responses, outcome.alone, 500),
                "p99": _ratio(outcome.responses, outcome.alone, 990),
                "gpu_share": round(outcome.run_ns / result.wall_ns, 4),
            }
            rows.append(row | _audited(result, simulated))
    return rows


# -- many tenants on many devices --------------------------------------------------------------------------------------


def cluster(profiles: list[Profile], options: Options, gpus: int, tenants: int, load_permille: int) -> list[Row]:
    """Run `tenants` tenants of mixed classes on `gpus` devices, with a total load of `load_permille`. One row per policy and
    class.

    The slowdown of a request is its response time, relative to the tenant alone on the device.
    """
    rows = []
    for policy in options.policies:
        jobs = [
            (profiles, tenants // gpus + (gpu < tenants % gpus), load_permille, gpu, options, policy)
            for gpu in range(gpus)
        ]
        rows += _summary(policy, _spread(jobs, _device, options.processes), options)
    return rows


def _device(job: tuple[list[Profile], int, int, int, Options, str]) -> tuple[list[Tenant], DeviceResult]:
    profiles, count, load_permille, gpu, options, policy = job
    seed = f"{options.seed}/{gpu}"
    tenants = mix(profiles, count, load_permille, seed)
    result = SimulatedDevice(tenants, policy, seed, options.config, options.audit).run(options.wall_ns)
    return tenants, replace(result, metrics=None)


def _summary(policy: str, found: list[tuple[list[Tenant], DeviceResult]], options: Options) -> list[Row]:
    wall = options.wall_ns * len(found)
    rows: list[Row] = []
    for priority in range(5):
        slow: list[int] = []
        run = on_time = asked = members = 0
        for tenants, result in found:
            for tenant in tenants:
                if tenant.policy.priority == priority:
                    outcome = result.outcomes[tenant.id]
                    members += 1
                    run += outcome.run_ns
                    slow += [r * 1000 // a for r, a in zip(outcome.responses, outcome.alone, strict=True)]
                    if tenant.policy.objective_ns:
                        asked += outcome.programs
                        on_time += sum(r <= tenant.policy.objective_ns for r in outcome.responses)
        rows.append(
            {
                "policy": policy,
                "class": f"P{priority}",
                "tenants": members,
                "requests": len(slow),
                "slowdown_p50": quantile(slow, 500) / 1000,
                "slowdown_p99": quantile(slow, 990) / 1000,
                "on_time": round(on_time / asked, 4) if asked else None,
                "gpu_share": round(run / wall, 4),
            }
        )
    rows.append(
        {
            "policy": policy,
            "class": "all",
            "tenants": sum(len(tenants) for tenants, _ in found),
            "requests": sum(row["requests"] for row in rows),
            "slowdown_p50": None,
            "slowdown_p99": None,
            "on_time": None,
            "gpu_share": round(sum(result.run_ns for _, result in found) / wall, 4),
            "launches": sum(result.launches for _, result in found),
            "violations": sum(result.violations for _, result in found) if options.audit else None,
        }
    )
    return rows
