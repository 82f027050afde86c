"""The pacing windows: the maximum GPU time in flight, per class."""

from __future__ import annotations

from collections.abc import Iterable

from wooly_dispatch.events import PRIORITIES, Config

PROTECTED = 2
"""Classes below this number (P0 and P1) are protected: the windows of lower classes are narrowed for them."""

WIDTH = 1000
"""Width, in permille, at which a window has the size of the rule. Epochs change the width within MIN_WIDTH and MAX_WIDTH."""
MIN_WIDTH = 50
MAX_WIDTH = 20_000


def windows(config: Config, live: Iterable[tuple[int, int]], width: int) -> tuple[int, ...]:
    """The window of each class, in ns.

    Only live P0 and P1 sessions of higher classes narrow the window of a class: P1 does not narrow its own window.

    Args:
        config: constants of the rule.
        live: priority and service time (ns, 0: unknown) of each live P0 and P1 session.
        width: permille, from `adapted`.
    """
    least = [0] * PROTECTED
    for priority, service in live:
        service = service or config.service_ns
        least[priority] = min(least[priority] or service, service)
    found = []
    for priority in range(PRIORITIES):
        above = [service for service in least[:priority] if service]
        if not above:
            found.append(config.free_window_ns)
            continue
        wanted = min(above) * config.window_permille * width // 1_000_000
        found.append(max(2 * config.latency_ns, min(wanted, config.max_window_ns)))
    return tuple(found)


def adapted(config: Config, width: int, slowdown_permille: int, idle_permille: int) -> int:
    """The width after an epoch: half if P0 is too slow; an eighth wider if P0 is fast enough and the device is idle too much."""
    if slowdown_permille > config.slow_permille:
        return max(width // 2, MIN_WIDTH)
    if 0 < slowdown_permille < config.calm_permille and idle_permille > config.idle_permille:
        return min(width + width // 8, MAX_WIDTH)
    return width
