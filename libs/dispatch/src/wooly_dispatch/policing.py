"""Token buckets of P0 and P1: what a session declares becomes its bucket; sessions that declare nothing share one per device.

P0 and P1 go before every other class, so whatever they may take in their class is taken from all others. A bucket bounds it: over
any time t at most rate * t + burst. What a session submits beyond its bucket runs as P2, in the fair share of its weight.

A declared rate is one of requests, in wall time. The shared bucket earns by what the device does, and by its idle time, so that
its share also holds where the device gets only a part of its host.
"""

from __future__ import annotations

from wooly_dispatch.events import Config, Policy
from wooly_dispatch.windows import PROTECTED

FULL = 1000
JITTER_PERMILLE = 100
"""How much more than declared a session's bucket earns: requests do not come like clockwork."""
BURST_REQUESTS = 2
"""Requests that a bucket holds: one may be early while another waits."""


def declared(priority: int, weight: int, service_ns: int, objective_ns: int, interval_ns: int) -> Policy:
    """The policy of what a session declares. P0 and P1 get a bucket of their own if they declare service time and interval."""
    rate = burst = 0
    if priority < PROTECTED and service_ns and interval_ns:
        rate = min(FULL, -(-service_ns * (FULL + JITTER_PERMILLE) // interval_ns))
        burst = BURST_REQUESTS * service_ns
    return Policy(priority, weight, service_ns, objective_ns, rate, burst)


def undeclared_burst_ns(config: Config) -> int:
    """What the bucket of all undeclared P0 and P1 sessions holds: requests of the service time that is assumed of them."""
    return BURST_REQUESTS * config.service_ns
