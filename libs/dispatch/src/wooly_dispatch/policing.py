"""Token buckets of P0 and P1. A session that declares its needs has its own bucket; all other P0 and P1 sessions share one per
device.

P0 and P1 run before every other class, so their work takes time from all other classes. A bucket limits this: in any time t, at
most rate * t + burst. Work of a session beyond its bucket runs as P2, with a fair share by the session's weight.

A declared rate is a rate of requests in wall time. The shared bucket refills with the device's work and idle time instead. So its
share is also right if other programs take a part of the host's time.
"""

from __future__ import annotations

from wooly_dispatch.events import Config, Policy
from wooly_dispatch.windows import PROTECTED

FULL = 1000
JITTER_PERMILLE = 100
"""Permille by which a session's bucket refills faster than the declared rate, because requests do not arrive at regular
intervals.
"""
BURST_REQUESTS = 2
"""Number of requests that a full bucket covers: one request may arrive early while another one waits."""


def declared(priority: int, weight: int, service_ns: int, objective_ns: int, interval_ns: int) -> Policy:
    """The policy of a session with these declarations. A P0 or P1 session that declares service time and interval gets its own
    bucket.
    """
    rate = burst = 0
    if priority < PROTECTED and service_ns and interval_ns:
        rate = min(FULL, -(-service_ns * (FULL + JITTER_PERMILLE) // interval_ns))
        burst = BURST_REQUESTS * service_ns
    return Policy(priority, weight, service_ns, objective_ns, rate, burst)


def undeclared_burst_ns(config: Config) -> int:
    """Size, in ns, of the bucket that all undeclared P0 and P1 sessions share: `BURST_REQUESTS` requests of the assumed
    service time.
    """
    return BURST_REQUESTS * config.service_ns
