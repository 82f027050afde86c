"""Weights that stay on the device without a session, by tenant and name. With `pinned_files`, they survive the process.

The device loop's thread owns this module.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wooly_executor.billing.memory_samples import MemorySamples
from wooly_executor.errors import BindingError, ExecutorError, LoopEndedError
from wooly_executor.memory.accounts import Account
from wooly_executor.memory.book import Scope
from wooly_executor.memory.ledger import Ledger
from wooly_executor.runtime.device import TorchDevice
from wooly_executor.session import Session
from wooly_executor.weights.contents import Contents
from wooly_executor.weights.pinned_files import PinnedContent, PinnedFiles, PinnedList

log = logging.getLogger("wooly.executor")

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
        files: where the weights are saved; None: they are lost when the process ends.
        call: runs a function in the device loop's thread; any thread may use it.
        device: the device.

    Attributes:
        accounts: by tenant and name.
    """

    def __init__(
        self,
        ledger: Ledger,
        contents: Contents,
        samples: MemorySamples,
        clock: Callable[[], int],
        files: PinnedFiles | None,
        call: Callable[[Callable[[], Any]], Any],
        device: TorchDevice,
    ) -> None:
        self.accounts: dict[tuple[str, str], Account] = {}
        self._ledger, self._contents, self._samples, self._clock = ledger, contents, samples, clock
        self._files, self._call, self._device = files, call, device
        #: Why weights would not survive the process; empty if they are saved.
        self._unsaved: dict[tuple[str, str], str] = {}

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
        stores = dict.fromkeys([s for b, s in account.shared.items() if b not in session.holdings.ipc])
        if not stores:
            raise BindingError(
                "nothing to pin: this session shares no content; set WOOLYAI_DEDUP and upload the weights first"
            )
        if key in self.accounts:
            raise BindingError(f"weights {name!r} are already pinned; remove them first: `wooly weights rm {name}`")
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
        self._save(key, pin)
        return self._ledger.book.has(pin.name)

    def _save(self, key: tuple[str, str], pin: Account) -> None:
        """Write the contents of a name to files, in another thread."""
        if self._files is None:
            self._unsaved[key] = "this executor saves no weights (WOOLY_EXECUTOR_PINS_DISK)"
            return
        self._unsaved[key] = "they are being saved"
        stores = {}
        for store in pin.shared.values():
            known = self._ledger.book.known_as(store)
            if known is not None:
                stores[known[0].hex()] = store
        contents = tuple([PinnedContent(content, self._ledger.store_bytes(store)) for content, store in stores.items()])

        def source(content: str) -> Tensor | None:
            found: Tensor | None = self._call(lambda: self._held(pin, stores[content])).result()
            if found is None or self._device.host:
                return found
            with self._device.copy_context():
                return found.cpu()

        def done(why: str) -> None:
            if why:
                log.warning("weights %r are pinned, but would be lost at the end of this process: %s", key[1], why)
            self._call(lambda: self._saved(key, pin, why))

        self._files.save(PinnedList(*key, pin.scope.value, contents), source, done)

    def _held(self, pin: Account, store: int) -> Tensor | None:
        """The bytes of a pinned store. Nothing changes them while they are pinned: a session that writes gets a copy."""
        if store not in pin.shared.values() or self._ledger.accounts.get(pin.name) is not pin:
            return None
        return self._contents.here.get(store)

    def _saved(self, key: tuple[str, str], pin: Account, why: str) -> None:
        if self.accounts.get(key) is pin:
            self._unsaved[key] = why
        elif self._files is not None:  # it was removed meanwhile
            self._files.remove(*key)

    def restore(self) -> None:
        """Bring back the weights of earlier processes. Call this in a thread of its own; it waits for the disk."""
        if self._files is None:
            return
        for saved in self._files.lists():
            restored = 0
            for number, wanted in enumerate(saved.contents, 1):
                try:
                    memory, head = self._files.read(wanted)
                    self._call(functools.partial(self._bring, saved, number, wanted, memory, head)).result()
                    restored += 1
                except LoopEndedError:
                    return
                except (OSError, ExecutorError) as e:
                    log.warning("a tensor of the pinned weights %r is not restored: %s", saved.name, e)
            if restored:
                log.info("pinned weights %r are back: %d of %d tensors", saved.name, restored, len(saved.contents))

    def _bring(self, saved: PinnedList, number: int, wanted: PinnedContent, memory: Tensor, head: bytes) -> None:
        """Put one content of an earlier process on the device.

        Raises:
            BindingError: the name was removed meanwhile, or pinned by a session.
            OutOfMemoryError: there is no room for the content.
        """
        key, now = (saved.tenant, saved.name), self._clock()
        pin = self.accounts.get(key)
        if self._files is not None and not self._files.has(*key):
            raise BindingError("they were removed meanwhile")
        if pin is None:
            scope = Scope(saved.scope)
            pin = self._ledger.open(f"pin {saved.tenant} {saved.name}", tenant=saved.tenant, scope=scope, now=now)
            self.accounts[key] = pin
            self._samples.open(pin, now)
            self._unsaved[key] = ""
        elif self._unsaved.get(key):
            raise BindingError(f"weights {saved.name!r} were pinned again meanwhile")
        self._ledger.allocate(pin, number, wanted.nbytes, now)
        found = self._ledger.seal(pin, number, wanted.nbytes, bytes.fromhex(wanted.content), head, now)
        assert found is not None
        store, existed = found
        if not existed:
            self._contents.here[store] = (
                memory if self._device.host else self._device.empty(wanted.nbytes).copy_(memory)
            )

    def remove(self, tenant: str, name: str) -> bool:
        """Unpin contents. Returns False if the name does not exist."""
        pin = self.accounts.pop((tenant, name), None)
        if pin is None:
            return False
        self._samples.close(pin)
        self._contents.drop_released(self._ledger.close(pin, self._clock()))
        self._unsaved.pop((tenant, name), None)
        if self._files is not None:
            self._files.remove(tenant, name)
        return True

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """The pinned weights of a tenant."""
        book = self._ledger.book
        return [
            {
                "name": name,
                "scope": pin.scope.value,
                "bytes": book.has(pin.name),
                "tensors": len(pin.shared),
                "unsaved": self._unsaved.get((tenant, name), ""),
            }
            for (owner, name), pin in self.accounts.items()
            if owner == tenant
        ]
