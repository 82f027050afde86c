"""How much GPU time may be in flight, per class: the pacing windows."""

from __future__ import annotations

from collections.abc import Iterable

from wooly_dispatch.events import PRIORITIES, Config

PROTECTED = 2
"""Classes below this number (P0 and P1) are those for whose sake lower ones are paced."""

WIDTH = 1000
"""The width at which a window is what the rule says; epochs move it between the two bounds below."""
MIN_WIDTH = 50
MAX_WIDTH = 20_000


def windows(config: Config, live: Iterable[tuple[int, int]], width: int) -> tuple[int, ...]:
    """The window of each class, in ns.

    A class is paced for the sake of live P0 and P1 sessions of higher classes only: P1 does not hold itself back.

    Args:
        config: The rule's constants.
        live: Priority and service time (ns, 0 unknown) of each live P0 and P1 session.
        width: Permille, from `adapted`.
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
    """The width after an epoch: halved when P0 suffers, an eighth wider when it does not and the device idles."""
    if slowdown_permille > config.slow_permille:
        return max(width // 2, MIN_WIDTH)
    if 0 < slowdown_permille < config.calm_permille and idle_permille > config.idle_permille:
        return min(width + width // 8, MAX_WIDTH)
    return width
