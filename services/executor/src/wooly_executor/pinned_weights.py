"""Weights that stay on the device without a session, by tenant and name.

The device loop's thread owns this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wooly_executor.contents import Contents
from wooly_executor.errors import BindingError
from wooly_executor.memory.accounts import Account
from wooly_executor.memory.ledger import Ledger
from wooly_executor.memory_samples import MemorySamples
from wooly_executor.session import Session

#: Maximum characters of a name. Names appear in messages and in their headers, so all characters must be printable.
NAME_LENGTH = 128
#: Maximum number of pinned names of one tenant, and of tensors under all its names. Each tensor takes host memory that is charged
#: to no session.
PINS_PER_TENANT = 64
TENSORS_PER_TENANT = 131_072


class PinnedWeights:
    """The pinned weights of one device.

    Args:
        ledger: has an account for each name.
        contents: the bytes.
        samples: records the memory that each account is charged for.
        clock: returns monotonic ns.

    Attributes:
        accounts: by tenant and name.
    """

    def __init__(self, ledger: Ledger, contents: Contents, samples: MemorySamples, clock: Callable[[], int]) -> None:
        self.accounts: dict[tuple[str, str], Account] = {}
        self._ledger, self._contents, self._samples, self._clock = ledger, contents, samples, clock

    def add(self, session: Session, name: str) -> int:
        """Pin all contents that the session shares, under a name. Returns the number of bytes.

        Raises:
            BindingError: the name is not valid or is in use, the session shares nothing, or the tenant has reached its limit.
        """
        account = session.holdings.account
        if not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
            raise BindingError(
                f"{name[:NAME_LENGTH]!r} is not a valid name for weights; use 1 to {NAME_LENGTH} printable characters"
            )
        key = (account.tenant, name)
        if not account.shared:
            raise BindingError(
                "nothing to pin: this session shares no content; set WOOLYAI_DEDUP and upload the weights first"
            )
        if key in self.accounts:
            raise BindingError(f"weights {name!r} are already pinned; remove them first: `wooly weights rm {name}`")
        stores = dict.fromkeys(account.shared.values())
        mine = [pin for (tenant, _), pin in self.accounts.items() if tenant == account.tenant]
        tensors = len(stores) + sum([len(pin.shared) for pin in mine])
        if len(mine) >= PINS_PER_TENANT or tensors > TENSORS_PER_TENANT:
            raise BindingError(
                f"too many pinned weights: the tenant has {len(mine)} models, and with this one {tensors} tensors; at most "
                f"{PINS_PER_TENANT} models and {TENSORS_PER_TENANT} tensors are allowed; remove a model: `wooly weights rm`"
            )
        now = self._clock()
        pin = self._ledger.open(f"pin {account.tenant} {name}", tenant=account.tenant, scope=account.scope, now=now)
        for number, store in enumerate(stores, 1):
            self._ledger.adopt(pin, number, store, now)
        self.accounts[key] = pin
        self._samples.open(pin, now)
        return self._ledger.book.has(pin.name)

    def remove(self, tenant: str, name: str) -> bool:
        """Unpin contents. Returns False if the name does not exist."""
        pin = self.accounts.pop((tenant, name), None)
        if pin is None:
            return False
        self._samples.close(pin)
        self._contents.drop_released(self._ledger.close(pin, self._clock()))
        return True

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """The pinned weights of a tenant."""
        book = self._ledger.book
        return [
            {"name": name, "scope": pin.scope.value, "bytes": book.has(pin.name), "tensors": len(pin.shared)}
            for (owner, name), pin in self.accounts.items()
            if owner == tenant
        ]
