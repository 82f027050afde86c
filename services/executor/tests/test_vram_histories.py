"""Random histories of sessions that upload, share, write, free, exceed the device and crash: every byte reads as written."""

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from wooly_executor.memory.book import Scope
from wooly_executor.memory.swap import Place, Policy
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.vram import SwapSettings
from wooly_testkit.effort import examples
from wooly_wis.dtypes import DType

KIB = 1 << 10
#: Bytes of the device, of one buffer, and of host memory for swapping; the disk has plenty.
DEVICE, SIZE, HOST = 960 * KIB, 200 * KIB, 450 * KIB
NAMES, BUFFERS, SEEDS = ["a", "b", "c", "d"], [1, 2, 3], [1, 2]


def content(seed):
    return bytes([seed, seed * 3]) * (SIZE // 2)


class VramMachine(RuleBasedStateMachine):
    """Random histories. `truth`: what each session wrote, as if it were alone on a device of unlimited size."""

    tools = None  # classes of the fixtures (`Device`, `Body`, ...): set below

    @initialize(
        scopes=st.lists(st.sampled_from(Scope), min_size=4, max_size=4),
        classes=st.lists(
            st.sampled_from((1, 2, 4)), min_size=4, max_size=4
        ),  # what P0 has, others may wait for without end
    )
    def begin(self, scopes, classes):
        self.folder = tempfile.TemporaryDirectory(prefix="wooly-")
        swap = SwapSettings(Policy(0, 100 * KIB, 0), HOST, 64 << 20, Path(self.folder.name), patience_ns=20_000_000_000)
        self.device = self.tools.device(Path(self.folder.name) / "x.sock", TorchCpuRuntime(), DEVICE, None, swap)
        self.truth, self.clients, self.count = {}, {}, 0
        self.classes = dict(zip(NAMES, classes, strict=True))
        for name, scope in zip(NAMES, scopes, strict=True):
            self.open(name, scope)

    def open(self, name, scope):
        self.count += 1
        tenant = "t" if name in "ab" else "u"
        self.clients[name] = self.device.open(
            f"{name}{self.count}", tenant=tenant, scope=scope, priority=self.classes[name]
        )
        self.truth[name] = {}

    names, buffers, seeds = st.sampled_from(NAMES), st.sampled_from(BUFFERS), st.sampled_from(SEEDS)

    @rule(s=names, n=buffers, seed=seeds, wait=st.booleans())
    def load(self, s, n, seed, wait):
        if n not in self.truth[s]:
            self.clients[s].load(n, content(seed))
            self.truth[s][n] = content(seed)
            if wait:
                self.clients[s].sealed()

    @rule(s=names, n=buffers)
    def compute(self, s, n):
        """Write in place, by a program."""
        if n in self.truth[s]:
            self.clients[s].run(self.tools.invert(SIZE), {"x": n})
            self.truth[s][n] = bytes([255 - b for b in self.truth[s][n][:2]]) * (SIZE // 2)

    @rule(s=names, n=buffers, at=st.integers(0, SIZE - 64))
    def write(self, s, n, at):
        """Write a part, from the client, and undo it, because `compute` needs a buffer of two repeated bytes."""
        if n in self.truth[s]:
            before = self.truth[s][n]
            self.clients[s].write(n, b"\x77" * 64, at)
            assert self.clients[s].read(n, 64, at) == b"\x77" * 64
            self.clients[s].write(n, before[at : at + 64], at)

    @rule(s=names, n=buffers)
    def read(self, s, n):
        if n in self.truth[s]:
            assert self.clients[s].read(n, SIZE) == self.truth[s][n]

    @rule(s=names, n=buffers)
    def free(self, s, n):
        if self.truth[s].pop(n, None) is not None:
            self.clients[s].run(self.tools.body().free("x"), {"x": n})

    @rule(s=names, scope=st.sampled_from(Scope))
    def crash(self, s, scope):
        name = f"{s}{self.count_of(s)}"
        self.clients[s].channel.close()
        self.device.wait_closed(name)
        self.open(s, scope)

    def count_of(self, s):
        ids = self.device.call(lambda: [x.id for x in self.device.loop.sessions.all()])
        return next(i[1:] for i in ids if i[0] == s)

    @invariant()
    def every_byte_is_on_an_account(self):
        self.device.check()

    @invariant()
    def only_those_share_who_may(self):
        def holders():
            found = {}
            for session in self.device.loop.sessions.all():
                for store in session.holdings.account.shared.values():
                    found.setdefault(store, set()).add(
                        (session.holdings.account.tenant, session.holdings.account.scope)
                    )
            return found

        for who in self.device.call(holders).values():
            if len({tenant for tenant, _ in who}) > 1:
                assert {scope for _, scope in who} == {Scope.SHARED}

    def teardown(self):
        for s, buffers in self.truth.items():
            for n, data in buffers.items():
                assert self.clients[s].read(n, SIZE) == data
        vram = self.device.loop.vram
        self.device.stop()
        assert vram.ledger.facts().own == vram.ledger.facts().contents == 0
        assert vram.swap_space.used == {Place.HOST: 0, Place.DISK: 0}
        self.folder.cleanup()


def test_vram_any_history_keeps_every_byte(wis):
    def invert(nbytes):
        v = wis.at(DType.U8, nbytes)
        return wis.body().call("aten.bitwise_not_.default", ("inout", "x", v))

    class Tools:
        device, body = wis.device, wis.body

    Tools.invert = staticmethod(invert)
    VramMachine.tools = Tools
    case = VramMachine.TestCase
    case.settings = settings(
        max_examples=examples(20, 60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
