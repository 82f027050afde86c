"""Computes the price of a run from the mean of the program's runs so far, if the device is a CPU.

The pace tells how fast the core is. It does not tell how warm the caches are, nor how much other processes use the memory. So
equal runs differ by ten or twenty percent from one second to the next, but their price should be equal. If a tenant has run a
program often, a run is priced at the mean of these runs, as long as its measured time is near that mean.

The difference between measured time and price goes to the tenant's balance. The tenant pays the balance with later runs, a little
each time. So in the long run a tenant pays for the measured time of its runs, within `SETTLED_NS`.
"""

from __future__ import annotations

from collections import OrderedDict

#: Number of first runs of a program that are not counted, because the program is still being prepared, and number of counted runs
#: from which on the mean is used.
SKIPPED_RUNS, MEAN_FROM_RUNS = 40, 32
#: A run is priced at the mean if its time is between `MIN_RATIO` and `MAX_RATIO` times the mean, otherwise at the nearest bound.
#: A core has half its speed while another process uses its other hardware thread.
MAX_RATIO, MIN_RATIO = 2.0, 0.5
#: Maximum weight of the past in the mean, in runs. Later runs all have the same weight.
MAX_WEIGHT = 100_000
#: Time constant of paying a balance, in ns of the tenant's own core time at full speed: the balance shrinks by 1/e in this time,
#: and a tenant never owes more. It is long compared with a run of a model, so that a phase of slower cores does not change the
#: price of half a minute; it is short compared with an hour at half price.
SETTLED_NS = 300_000_000_000
#: Maximum number of remembered programs of tenants, and of remembered balances.
REMEMBERED = 8192


class MeanPrice:
    """The mean price of one program of one tenant.

    Attributes:
        form: identity of the prepared program or plan that runs; a change resets the mean.
        runs: number of counted runs.
        mean_ns: mean core time of a run, in ns at full speed.
        mean_core_ns: mean core time of a run as measured, in ns.
    """

    __slots__ = ("_skipped", "form", "mean_core_ns", "mean_ns", "runs")

    def __init__(self, form: int) -> None:
        self.form = form
        self._skipped = self.runs = 0
        self.mean_ns = self.mean_core_ns = 0.0

    def price(self, ns: int, core_ns: int, part: int, whole: int) -> int:
        """Price, in ns at full speed, of a run so far, which has done `part` of its `whole` by the estimates.

        The measured time is converted to full speed in two ways, because the pace may be wrong: with the current pace (`ns`), and
        with the mean pace of such runs.

        Args:
            ns: core time so far, at full speed.
            core_ns: core time so far, as measured.
            part: sum of the estimates of the kernels so far.
            whole: sum of the estimates of all kernels.
        """
        if self.runs < MEAN_FROM_RUNS or not whole or not self.mean_core_ns:
            return ns
        other = core_ns * self.mean_ns / self.mean_core_ns
        return int(min(max(self.mean_ns * part / whole, min(ns, other) * MIN_RATIO), max(ns, other) * MAX_RATIO))

    def ran(self, ns: int, core_ns: int) -> None:
        """Add the total core time of a run to the mean."""
        if self._skipped < SKIPPED_RUNS:
            self._skipped += 1
            return
        self.runs = min(self.runs + 1, MAX_WEIGHT)
        self.mean_ns += (self._clamped(ns, self.mean_ns) - self.mean_ns) / self.runs
        self.mean_core_ns += (self._clamped(core_ns, self.mean_core_ns) - self.mean_core_ns) / self.runs

    def _clamped(self, ns: int, mean: float) -> float:
        return min(max(ns, mean * MIN_RATIO), mean * MAX_RATIO) if self.runs > MEAN_FROM_RUNS else ns


class PriceBook:
    """The mean prices and balances of all tenants. No tenant's runs change the prices of another. The device loop's thread owns
    it.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bytes], MeanPrice] = OrderedDict()
        self._owed: OrderedDict[str, int] = OrderedDict()  # by tenant: measured minus billed time, in ns

    def bill(self, tenant: str, took_ns: int, price_ns: int) -> int:
        """The bill of a piece of work: its price plus a part of the tenant's balance, in ns.

        Args:
            tenant: tenant that ran it.
            took_ns: measured core time at full speed.
            price_ns: the price.
        """
        owed = self._owed.get(tenant, 0)
        billed = max(price_ns + owed * min(took_ns, SETTLED_NS) // SETTLED_NS, 0)
        self._owed[tenant] = owed + took_ns - billed
        self._owed.move_to_end(tenant)
        if len(self._owed) > REMEMBERED:
            self._owed.popitem(last=False)
        return billed

    def of(self, tenant: str, digest: bytes, form: object) -> MeanPrice:
        """The mean price of a program.

        Args:
            tenant: tenant that runs it.
            digest: digest of the program.
            form: the prepared program or the plan.
        """
        key = tenant, digest
        found = self._known.get(key)
        if found is None or found.form != id(form):
            found = self._known[key] = MeanPrice(id(form))
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return found
