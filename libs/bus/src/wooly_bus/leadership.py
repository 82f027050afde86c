"""Leader election among equal processes: the leader holds a lease in a JetStream key-value bucket.

The bucket removes a key that is not renewed. A former leader may believe for the length of the lease that it still leads. So the
leader's work must be correct even if two processes do it, as conditional changes of a shared state are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import nats.errors
from nats.js.api import KeyValueConfig
from nats.js.errors import Error as JetStreamError
from nats.js.errors import KeyWrongLastSequenceError, NotFoundError, ServiceUnavailableError
from nats.js.kv import KeyValue

from wooly_bus.app import ServiceApp
from wooly_bus.streams import replicas, reserve

log = logging.getLogger("wooly.bus")
BUCKET = "WOOLY_LEASES"
#: Length of the lease in seconds, unless the caller sets another one.
TTL_S = 4.0
#: Largest size of the bucket, in bytes. Each role takes a few hundred.
BUCKET_BYTES = 1 << 20
#: JetStream's error codes for: JetStream is not enabled for the account, or not enabled at all.
_ABSENT = (10039, 10076)
#: Lengths of the lease after which a JetStream that answers, but takes no lease, counts as absent: its disk was full, and
#: nats-server takes nothing until it is started again. A JetStream that does not answer may be on the other side of a cut, with
#: another leader. So may the majority of a cluster.
ABSENT_AFTER = 3
#: The same for JetStream of a cluster, in seconds. A leader of JetStream that loses the majority notices it after 20 s.
MAJORITY_S = 30.0


class Leadership:
    """Tries to become and stay the leader of `role` while `run` runs.

    Without JetStream, and if that of a single server fails for long, every process leads and does the work; see the module.
    If a cluster of NATS servers is cut in two, no process on the smaller side leads: it cannot hear the executors of the other
    side, and would end their sessions.

    Attributes:
        alone: there is no JetStream, or it fails, so this process leads without a lease.

    Args:
        app: the service, inside `running`.
        role: name of the role; one token of a subject.
        holder: name of this process, for logs.
        ttl_s: length of the lease, in seconds: after this time, another process may replace a dead leader.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, app: ServiceApp, role: str, holder: str, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._role, self._holder, self._ttl_s, self._clock = app, role, holder, ttl_s, clock
        self._until = 0.0
        #: When JetStream last took a lease.
        self._taken = clock()
        self._revision = 0
        #: Whether the log says that JetStream takes no lease.
        self._told = False
        self.alone = False
        self._bucket: KeyValue | None = None

    @property
    def held(self) -> bool:
        """Whether this process is the leader now."""
        return self.alone or self._clock() < self._until

    async def run(self) -> None:
        """Acquire and renew the lease until this task is cancelled. Then release the lease."""
        try:
            while True:
                await self.step()
                await asyncio.sleep(self._ttl_s / 4)
        finally:
            await self._release()

    async def step(self) -> None:
        """Acquire the lease, or renew it."""
        led, asked, bucket = self.held, self._clock(), None
        try:
            bucket = await self._open()
            if self._revision:
                self._revision = await bucket.update(self._role, self._holder.encode(), self._revision)
            else:
                self._revision = await bucket.create(self._role, self._holder.encode())
            self._until, self._taken, self.alone, self._told = asked + self._ttl_s, self._clock(), False, False
        except KeyWrongLastSequenceError:  # another process holds the lease
            self._revision, self._until, self._taken, self.alone, self._told = 0, 0.0, self._clock(), False, False
        except (nats.errors.Error, JetStreamError, OSError) as e:
            self._bucket = None
            why = str(e) or type(e).__name__
            if self._app.jetstream_votes:
                await self._lead_in_cluster(why)
            elif (
                isinstance(e, (ServiceUnavailableError, nats.errors.NoRespondersError))
                or getattr(e, "err_code", 0) in _ABSENT
            ):
                self.alone = True
            elif bucket is None:
                self.alone = False  # this process leads until its lease ends
            elif not self.alone and self._clock() - self._taken > ABSENT_AFTER * self._ttl_s:
                self.alone = True
                log.warning("%s leads without a lease, because JetStream takes none: %s", self._holder, why)
        if self.held != led:
            log.info("%s is %s the leader of %s", self._holder, "now" if self.held else "no longer", self._role)

    async def _lead_in_cluster(self, why: str) -> None:
        """The JetStream of a cluster takes no lease: on the side of the majority, the server with the only copy may be lost."""
        away_s = self._clock() - self._taken
        alone = away_s > MAJORITY_S and await self._has_majority()
        if alone and not self.alone:
            log.warning("%s leads without a lease, because JetStream takes none: %s", self._holder, why)
        elif away_s > ABSENT_AFTER * self._ttl_s and not alone and not self._told:
            self._told = True
            log.warning(
                "%s does not lead, because JetStream takes no lease: %s; more than half of the cluster's NATS servers must be "
                "connected with each other",
                self._holder,
                why,
            )
        self.alone = alone

    async def _has_majority(self) -> bool:
        """Whether the connected server is on the side of the cluster's majority, where JetStream has a leader that answers."""
        try:
            await self._app.jetstream().account_info()
        except (nats.errors.Error, JetStreamError, OSError):
            return False
        return True

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            js = self._app.jetstream()
            try:
                self._bucket = await js.key_value(BUCKET)
            except NotFoundError:
                config = KeyValueConfig(
                    bucket=BUCKET, ttl=self._ttl_s, history=1, max_bytes=BUCKET_BYTES, replicas=replicas()
                )
                self._bucket = await reserve(
                    js, f"KV_{BUCKET}", BUCKET_BYTES, BUCKET_BYTES, lambda _: js.create_key_value(config)
                )
        return self._bucket

    async def _release(self) -> None:
        revision, self._revision, self._until, self.alone = self._revision, 0, 0.0, False
        if revision and self._bucket is not None:
            with contextlib.suppress(
                nats.errors.Error, JetStreamError, OSError, TimeoutError
            ):  # otherwise, the lease expires
                await asyncio.wait_for(self._bucket.delete(self._role, last=revision), 1.0)
