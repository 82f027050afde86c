"""Weights that are kept on the device while no session has them, by tenant and name.

Owned by the device loop's thread.
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

#: Names are told to others, in messages and their heads: characters of one, all of which can be printed.
NAME_LENGTH = 128
#: Of one tenant: names, and tensors under all of them. Each tensor takes host memory that no session bears.
PINS_PER_TENANT = 64
TENSORS_PER_TENANT = 131_072


class PinnedWeights:
    """What is pinned on one device.

    Args:
        ledger: which has an account for each.
        contents: the bytes.
        samples: who is told what they bear.
        clock: monotonic ns.

    Attributes:
        accounts: by tenant and name.
    """

    def __init__(self, ledger: Ledger, contents: Contents, samples: MemorySamples, clock: Callable[[], int]) -> None:
        self.accounts: dict[tuple[str, str], Account] = {}
        self._ledger, self._contents, self._samples, self._clock = ledger, contents, samples, clock

    def add(self, session: Session, name: str) -> int:
        """Keep what the session shares when it is gone, under a name. Returns the bytes.

        Raises:
            BindingError: the session shares nothing, that is no name, or its tenant has pinned something under it, or too much.
        """
        account = session.holdings.account
        if not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
            raise BindingError(
                f"{name[:NAME_LENGTH]!r} is no name for weights: it has 1 to {NAME_LENGTH} characters that can be printed"
            )
        key = (account.tenant, name)
        if not account.shared:
            raise BindingError(
                "nothing to pin: this session shares no content (WOOLYAI_DEDUP is off, or nothing was uploaded)"
            )
        if key in self.accounts:
            raise BindingError(f"weights {name!r} are pinned already; `wooly weights rm {name}` first")
        stores = dict.fromkeys(account.shared.values())
        mine = [pin for (tenant, _), pin in self.accounts.items() if tenant == account.tenant]
        tensors = len(stores) + sum([len(pin.shared) for pin in mine])
        if len(mine) >= PINS_PER_TENANT or tensors > TENSORS_PER_TENANT:
            raise BindingError(
                f"the tenant's {len(mine)} pinned models and this one would have {tensors} tensors; a tenant may have "
                f"{PINS_PER_TENANT} models and {TENSORS_PER_TENANT} tensors here: `wooly weights rm` lets go of one"
            )
        now = self._clock()
        pin = self._ledger.open(f"pin {account.tenant} {name}", tenant=account.tenant, scope=account.scope, now=now)
        for number, store in enumerate(stores, 1):
            self._ledger.adopt(pin, number, store, now)
        self.accounts[key] = pin
        self._samples.open(pin, now)
        return self._ledger.book.has(pin.name)

    def remove(self, tenant: str, name: str) -> bool:
        """Let pinned contents go. False if there are none of that name."""
        pin = self.accounts.pop((tenant, name), None)
        if pin is None:
            return False
        self._samples.close(pin)
        self._contents.departed(self._ledger.close(pin, self._clock()))
        return True

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """What a tenant has pinned."""
        book = self._ledger.book
        return [
            {"name": name, "scope": pin.scope.value, "bytes": book.has(pin.name), "tensors": len(pin.shared)}
            for (owner, name), pin in self.accounts.items()
            if owner == tenant
        ]
