"""What a program's runs usually take, where the device is a CPU: that is what one more of them is priced at.

The pace tells how fast the core is, but not how warm its caches are for what comes next, nor who else uses the memory just now:
equal runs differ by a tenth or two from one second to the next. Who runs the same again should pay the same. So a run of a
program that a tenant has run often is priced as its runs are on average, as long as it took about that.

What the usual price leaves open, either way, stands in the tenant's balance and is paid with whatever the tenant runs next, a
little each time: over a life of the executor a tenant pays what its runs took, give or take `SETTLED_NS`, whatever it runs.
"""

from __future__ import annotations

from collections import OrderedDict

#: Runs of a program that are not counted, as it is still prepared, and counted runs from which on the mean is used.
FIRST, KNOWN = 40, 32
#: A run is priced at its usual time where it took between half of that and twice as much, else at what is nearest to it. A core
#: does half as much while its other hardware thread is somebody else's.
MORE, LESS = 2.0, 0.5
#: Runs that the mean is taken over; later ones weigh as much as the last of these.
MOST = 100_000
#: Core time, in ns at full pace, over which a balance is paid: what is open shrinks by 1/e in so much of the tenant's own runs.
#: No tenant can owe more than this. Long beside a run of a model, so that a phase in which a core is a tenth slower does not show
#: in what the runs of half a minute cost; short beside an hour at half price.
SETTLED_NS = 300_000_000_000
#: Programs of tenants that are remembered, and tenants' balances.
REMEMBERED = 8192


class MeanPrice:
    """Of one program of one tenant.

    Attributes:
        form: what it is run as, by its identity: where that changes, nothing is known of it.
        runs: how many were counted.
        mean_ns: what they took on average, in ns of cores at full pace.
        mean_core_ns: the same as measured.
    """

    __slots__ = ("_skipped", "form", "mean_core_ns", "mean_ns", "runs")

    def __init__(self, form: int) -> None:
        self.form = form
        self._skipped = self.runs = 0
        self.mean_ns = self.mean_core_ns = 0.0

    def price(self, ns: int, core_ns: int, part: int, whole: int) -> int:
        """What a run counts for so far, which was expected to have done `part` of its `whole` by now.

        What it took is known in two ways, as the pace may err: by the pace just now, and by the pace of such runs on average.

        Args:
            ns: what it took so far, at full pace.
            core_ns: the same as measured.
            part: estimates of its kernels so far.
            whole: of all its kernels.
        """
        if self.runs < KNOWN or not whole or not self.mean_core_ns:
            return ns
        other = core_ns * self.mean_ns / self.mean_core_ns
        return int(min(max(self.mean_ns * part / whole, min(ns, other) * LESS), max(ns, other) * MORE))

    def ran(self, ns: int, core_ns: int) -> None:
        """A run took so much in all."""
        if self._skipped < FIRST:
            self._skipped += 1
            return
        self.runs = min(self.runs + 1, MOST)
        self.mean_ns += (self._near(ns, self.mean_ns) - self.mean_ns) / self.runs
        self.mean_core_ns += (self._near(core_ns, self.mean_core_ns) - self.mean_core_ns) / self.runs

    def _near(self, ns: int, mean: float) -> float:
        return min(max(ns, mean * LESS), mean * MORE) if self.runs > KNOWN else ns


class PriceBook:
    """Every tenant's own: nobody's runs change what another pays. Owned by the device loop's thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bytes], MeanPrice] = OrderedDict()
        self._owed: OrderedDict[str, int] = OrderedDict()  # by tenant: ns that runs took beyond what was paid for them

    def settled(self, tenant: str, took_ns: int, price_ns: int) -> int:
        """What a piece of work is billed at: its usual price and a part of what the tenant's balance says.

        Args:
            tenant: who ran it.
            took_ns: what it took, at full pace.
            price_ns: its usual price.
        """
        owed = self._owed.get(tenant, 0)
        billed = max(price_ns + owed * min(took_ns, SETTLED_NS) // SETTLED_NS, 0)
        self._owed[tenant] = owed + took_ns - billed
        self._owed.move_to_end(tenant)
        if len(self._owed) > REMEMBERED:
            self._owed.popitem(last=False)
        return billed

    def of(self, tenant: str, digest: bytes, form: object) -> MeanPrice:
        """Of a program.

        Args:
            tenant: who runs it.
            digest: its name.
            form: what it is run as: itself, or its plan.
        """
        key = tenant, digest
        found = self._known.get(key)
        if found is None or found.form != id(form):
            found = self._known[key] = MeanPrice(id(form))
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found
