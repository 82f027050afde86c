"""One of several equal processes does what only one should: the holder of a lease in a JetStream key-value bucket.

The bucket forgets a key that is not renewed. Who was the leader may think so for as long as its lease: what it does must be
right also when another one does it too, which conditional changes of a shared state are.
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
from wooly_bus.streams import replicas

log = logging.getLogger("wooly.bus")
BUCKET = "WOOLY_LEASES"
TTL_S = 4.0
#: Bytes that the bucket may take: a few hundred for each role that is led.
BUCKET_BYTES = 1 << 20
#: JetStream's codes for: not enabled, for the account or at all.
_ABSENT = (10039, 10076)


class Leadership:
    """A try to be the leader of `role`, for as long as `run` runs.

    Without JetStream everybody leads: each does the work, and what they do must allow for it (see above).

    Attributes:
        alone: there is no JetStream.

    Args:
        app: the connection, inside `running`.
        role: what is led; one token.
        holder: who we are; for people.
        ttl_s: seconds until another one may follow a leader that died.
        clock: monotonic seconds.
    """

    def __init__(
        self, app: ServiceApp, role: str, holder: str, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._role, self._holder, self._ttl_s, self._clock = app, role, holder, ttl_s, clock
        self._until = 0.0
        self._revision = 0
        self.alone = False
        self._bucket: KeyValue | None = None

    @property
    def held(self) -> bool:
        """Whether we are the leader now."""
        return self.alone or self._clock() < self._until

    async def run(self) -> None:
        """Get and keep the lease, for ever. It is given up when this is cancelled."""
        try:
            while True:
                await self.step()
                await asyncio.sleep(self._ttl_s / 4)
        finally:
            await self._give_up()

    async def step(self) -> None:
        """Get the lease, or renew it."""
        led, asked = self.held, self._clock()
        try:
            bucket = await self._open()
            if self._revision:
                self._revision = await bucket.update(self._role, self._holder.encode(), self._revision)
            else:
                self._revision = await bucket.create(self._role, self._holder.encode())
            self._until, self.alone = asked + self._ttl_s, False
        except KeyWrongLastSequenceError:  # another one has it
            self._revision, self._until, self.alone = 0, 0.0, False
        except (nats.errors.Error, JetStreamError, OSError) as e:
            self._bucket = None
            if (
                isinstance(e, (ServiceUnavailableError, nats.errors.NoRespondersError))
                or getattr(e, "err_code", 0) in _ABSENT
            ):
                self.alone = True  # any other trouble ends with the lease
        if self.held != led:
            log.info("%s is %s leader of %s", self._holder, "the" if self.held else "no more the", self._role)

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            js = self._app.jetstream()
            try:
                self._bucket = await js.key_value(BUCKET)
            except NotFoundError:
                self._bucket = await js.create_key_value(
                    KeyValueConfig(
                        bucket=BUCKET, ttl=self._ttl_s, history=1, max_bytes=BUCKET_BYTES, replicas=replicas()
                    )
                )
        return self._bucket

    async def _give_up(self) -> None:
        revision, self._revision, self._until, self.alone = self._revision, 0, 0.0, False
        if revision and self._bucket is not None:
            with contextlib.suppress(nats.errors.Error, JetStreamError, OSError, TimeoutError):  # it ends by itself too
                await asyncio.wait_for(self._bucket.delete(self._role, last=revision), 1.0)
