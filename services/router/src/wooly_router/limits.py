"""The limits of one tenant: how much it may have at a time, and how fast it may ask for more.

An error names the limit and the numbers.

Counts come from the database that all routers share. Rates are per router.
"""

from __future__ import annotations

from wooly_bus.errors import RefusedError
from wooly_bus.web import Buckets

from wooly_router.settings import RouterSettings


class LimitError(RefusedError):
    """A tenant has reached a limit.

    Attributes:
        retry_s: seconds after which the request may be retried; 0: another session or job must end before.
    """

    def __init__(self, message: str, *, code: str = "router.limit", retry_s: float = 0.0) -> None:
        super().__init__(code, message, retryable=retry_s > 0)
        self.retry_s = retry_s


class Limits:
    """The limits of every tenant, from the router's settings."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.streams = settings.streams
        self._begun = Buckets(settings.tenant_opens, 4 * settings.tenant_opens)

    def check(self, tenant: str, what: str, count: int, setting: str, cure: str) -> None:
        """Check that a tenant with `count` of something may have one more.

        Args:
            tenant: name of the tenant.
            what: the counted things, in the plural.
            count: how many the tenant has.
            setting: the field of `RouterSettings` with the limit.
            cure: what the tenant's client can do.

        Raises:
            LimitError: the limit is reached.
        """
        limit = getattr(self._settings, setting)
        if count >= limit:
            raise LimitError(
                f"tenant {tenant} has {count} {what}, and the limit is {limit} (WOOLY_ROUTER_{setting.upper()}); {cure}"
            )

    def begin(self, tenant: str) -> None:
        """Count one more opened session or submitted job of a tenant.

        Raises:
            LimitError: the tenant does this too often.
        """
        if not self._begun.take(tenant):
            raise LimitError(
                f"tenant {tenant} opens sessions and submits jobs too fast: the limit is {self._begun.rate:g} per second on "
                "average, and four times as many in a burst (WOOLY_ROUTER_TENANT_OPENS); wait a second",
                retry_s=1.0,
            )
