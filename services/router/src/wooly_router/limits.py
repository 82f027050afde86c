"""What one tenant may have at a time, and how fast it may ask for more. Whoever reaches a limit is told which, with its figures.

Counts are of the database that all routers share; rates are one router's.
"""

from __future__ import annotations

from wooly_bus.errors import RefusedError
from wooly_bus.web import Buckets

from wooly_router.settings import RouterSettings


class LimitError(RefusedError):
    """A limit of a tenant's is reached.

    Attributes:
        retry_s: seconds after which it may be tried again; 0: something else must end before.
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
        """Whether a tenant that has `count` may have one more.

        Args:
            tenant: whose.
            what: is counted, in the plural.
            count: how many there are.
            setting: the field of `RouterSettings` that limits them.
            cure: what its client can do.

        Raises:
            LimitError: it may not.
        """
        limit = getattr(self._settings, setting)
        if count >= limit:
            raise LimitError(
                f"tenant {tenant} has {count} {what}, and may have {limit} (WOOLY_ROUTER_{setting.upper()}); {cure}"
            )

    def begin(self, tenant: str) -> None:
        """A tenant opens a session or submits a job.

        Raises:
            LimitError: it does so too often.
        """
        if not self._begun.take(tenant):
            raise LimitError(
                f"tenant {tenant} opens sessions and submits jobs too fast: {self._begun.rate:g} a second on average, four "
                "times as many at once (WOOLY_ROUTER_TENANT_OPENS); wait a second",
                retry_s=1.0,
            )
