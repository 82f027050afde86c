"""Random sequences of collectives: on "cuda" tensors, and with gloo on the same CPU tensors. Both must have the same values.

random_collectives.py FIRST LAST     the sequences of the seeds FIRST to LAST - 1

All ranks take the same steps, which follow from the seed. Only the numbers, and the order of waits, are a rank's own. Numbers are
small integers, so sums do not depend on the order of the ranks. A tensor is not used while a collective works on it.
"""

import datetime
import random
import sys
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
SIDES = ("cuda", "cpu")
STEPS, TENSORS = 40, 8

dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=200))
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
#: Groups, each with its ranks.
GROUPS = [(None, tuple(range(size)))]
for members in ((0, size - 1), tuple(range(size))[::2], tuple(range(1, size)), tuple(range(size))):
    if len(members) > 1:
        GROUPS.append((dist.new_group(list(members)), members))


class Sequence:
    """One sequence: pairs of tensors (on "cuda", on the CPU), and the collectives that work on some of them."""

    def __init__(self, seed):
        self.seed = seed
        self.shared, self.own = random.Random(seed), random.Random(seed * 1000 + rank)
        self.generator = torch.Generator().manual_seed(seed * 1000 + rank)
        self.pool = []
        self.works = []
        self.said = []

    def values(self, shape, dtype):
        host = torch.randint(-2, 3, shape, generator=self.generator).to(dtype)
        return [host.to("cuda"), host]

    def zeros(self, shape, dtype):
        return [torch.zeros(shape, dtype=dtype, device=side) for side in SIDES]

    def new(self, pair):
        if len(self.pool) >= TENSORS:
            self.pool.pop(self.shared.randrange(len(self.pool)))  # also while a collective works on it
        self.pool.append(pair)

    def is_busy(self, pair):
        """Whether a collective works on the memory of a tensor, as this rank knows."""
        memory = pair[1].untyped_storage().data_ptr()
        return any(memory in used for _, used in self.works)

    def pick(self, free=True):
        """A tensor. If it is in use, all works that use it are waited for."""
        pair = self.shared.choice(self.pool)
        if free and self.is_busy(pair):
            self.wait(pair[1].untyped_storage().data_ptr())
        return pair

    def wait(self, memory=None):
        """Wait for the works that use some memory, or for all, in this rank's order."""
        chosen = [w for w in self.works if memory is None or memory in w[1]]
        self.works = [w for w in self.works if w not in chosen]
        self.own.shuffle(chosen)
        for work, _ in chosen:
            for each in work:
                if each is not None:
                    each.wait()

    def call(self, function, *pairs):
        """Call a collective on both sides. `function` gets the index of the side, and whether to return a work."""
        later = self.shared.random() < 0.5
        works = [function(side, later) for side in (0, 1)]
        if later:
            self.works.append((works, {p[1].untyped_storage().data_ptr() for p in pairs}))

    def compare(self, what):
        for n, pair in enumerate(self.pool):
            if not self.is_busy(pair):
                ours, theirs = pair[0].cpu(), pair[1]
                if not torch.equal(ours, theirs):
                    self.said.append(f"seed {self.seed}, rank {rank}, {what}, tensor {n}: {ours}, with gloo {theirs}")

    def run(self):
        for _ in range(3):
            self.make()
        done = []
        for _ in range(STEPS):
            step = self.shared.choice(KINDS)
            done.append(step.__name__)
            step(self)
            if self.shared.random() < 0.2:
                self.compare(" ".join(done[-6:]))
            if self.said:
                return
        self.wait()
        self.compare("the end: " + " ".join(done[-8:]))

    # -- steps on one rank --------------------------------------------------------------------------------------------

    def make(self):
        n = self.shared.choice((1, 2, 3, 8, 8, 1000, 40_000))
        shape = self.shared.choice(((n,), (n, 2), (2, n)))
        self.new(self.values(shape, self.shared.choice(DTYPES)))

    def slice(self):
        """A view: a collective on it writes a part of another tensor."""
        pair = self.shared.choice(self.pool)
        n = len(pair[1])
        first = self.shared.randrange(n)
        last = self.shared.randrange(first, n) + 1
        self.new([t[first:last] for t in pair])

    def write(self):
        pair, kind = self.pick(), self.shared.randrange(4)
        for t in pair:
            if kind == 0:
                t.add_(rank + 1).clamp_(-3, 3)
            elif kind == 1:
                t.mul_(2).remainder_(5)
            elif kind == 2:
                t[:1] = rank
            else:
                t.neg_()

    def compute(self):
        pair = self.pick()
        self.new([(t + 1).clamp(-3, 3) for t in pair])

    def read(self):
        pair = self.pick()
        if pair[0].sum().item() != pair[1].sum().item():
            self.said.append(f"seed {self.seed}, rank {rank}: another sum")

    def rest(self):
        """Wait for some work, which is another one on each rank."""
        if self.works:
            work, used = self.works.pop(self.own.randrange(len(self.works)))
            for each in work:
                if each is not None:
                    each.wait()
            del used

    def wait_for_all(self):
        self.wait()

    def small(self, pair):
        """Keep the numbers small: a product of sums must not round."""
        self.wait(pair[1].untyped_storage().data_ptr())
        for t in pair:
            t.remainder_(3)

    # -- collectives --------------------------------------------------------------------------------------------------

    def group(self):
        group, members = self.shared.choice(GROUPS)
        return group, members, rank in members

    def all_reduce(self):
        pair, op, (group, _, member) = self.pick(), self.shared.choice(OPS), self.group()
        self.small(pair)
        if member:
            self.call(lambda side, later: dist.all_reduce(pair[side], op, group, async_op=later), pair)
        else:
            self.shared.random()
        self.settle(pair)

    def settle(self, pair):
        """Wait at once in half of the cases, else before the next use. Ranks outside of the group draw the same numbers."""
        if self.shared.random() < 0.5:
            self.wait(pair[1].untyped_storage().data_ptr())

    def broadcast(self):
        pair, (group, members, member) = self.pick(), self.group()
        source = self.shared.choice(members)
        if member:
            self.call(lambda side, later: dist.broadcast(pair[side], source, group, async_op=later), pair)
        else:
            self.shared.random()
        self.settle(pair)

    def all_gather(self):
        pair, (group, members, member) = self.pick(), self.group()
        flat = [t.contiguous() for t in pair]
        found = self.zeros((len(members), *pair[1].shape), pair[1].dtype)
        whole, listed = self.shared.random() < 0.5, self.shared.random() < 0.5

        def gather(side, later):
            if whole and not listed:
                out = found[side].view(len(members) * flat[side].shape[0], *flat[side].shape[1:])
                return dist.all_gather_into_tensor(out, flat[side], group, async_op=later)
            return dist.all_gather(list(found[side].unbind()), flat[side], group, async_op=later)

        if member:
            self.call(gather, found, flat)
        else:
            self.shared.random()
        self.new(found)
        self.settle(found)

    def reduce_scatter(self):
        op, (group, members, member) = self.shared.choice(OPS[:4]), self.group()
        dtype, n = self.shared.choice(DTYPES), self.shared.choice((1, 5, 700))
        given, found = self.values((len(members) * n,), dtype), self.zeros((n,), dtype)
        if member:
            self.call(
                lambda side, later: dist.reduce_scatter_tensor(found[side], given[side], op, group, async_op=later),
                found,
                given,
            )
        else:
            self.shared.random()
        self.new(found)
        self.settle(found)

    def all_to_all(self):
        group, members, member = self.group()
        dtype, n = self.shared.choice(DTYPES), len(members)
        parts = [[self.shared.randrange(4) for _ in members] for _ in members]
        if not member:
            self.shared.random()
            self.make()
            return
        me = members.index(rank)
        sent, taken = parts[me], [row[me] for row in parts]
        given, found = self.values((sum(sent), 2), dtype), self.zeros((sum(taken), 2), dtype)
        even = all(k == parts[0][0] for row in parts for k in row) and n == size
        splits = (None, None) if even else (taken, sent)
        self.call(
            lambda side, later: dist.all_to_all_single(found[side], given[side], *splits, group, async_op=later),
            found,
            given,
        )
        self.wait(found[1].untyped_storage().data_ptr())
        if not torch.equal(found[0].cpu(), found[1]):
            self.said.append(f"seed {self.seed}, rank {rank}: all_to_all {found}")
        self.make()

    def coalesced(self):
        pairs = [self.values((n,), torch.float32) for n in (1, 4, 300)]
        group, _, member = self.group()
        if member:
            with dist._coalescing_manager(group, device=torch.device("cuda"), async_ops=True) as manager:
                for pair in pairs:
                    dist.all_reduce(pair[0], group=group)
            for pair in pairs:
                dist.all_reduce(pair[1], group=group)
            manager.wait()
        for pair in pairs:
            self.new(pair)

    def send(self):
        first, second = self.shared.sample(range(size), 2)
        pair = self.pick()
        flat = [t.contiguous() for t in pair]
        found = self.zeros(pair[1].shape, pair[1].dtype)
        batched = self.shared.random() < 0.5
        for side in (0, 1):
            if batched and rank in (first, second):
                other = second if rank == first else first
                ops = [dist.P2POp(dist.isend, flat[side], other), dist.P2POp(dist.irecv, found[side], other)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            elif rank == first:
                dist.send(flat[side], second)
            elif rank == second:
                dist.recv(found[side], first)
        self.new(found)

    def objects(self):
        found = [None] * size
        dist.all_gather_object(found, {"rank": rank, "seed": self.seed})
        if found != [{"rank": r, "seed": self.seed} for r in range(size)]:
            self.said.append(f"seed {self.seed}, rank {rank}: objects {found}")

    def barrier(self):
        dist.barrier()


KINDS = [
    *[Sequence.make, Sequence.slice, Sequence.write, Sequence.write, Sequence.compute, Sequence.read, Sequence.rest]
    * 2,
    *[Sequence.all_reduce, Sequence.broadcast, Sequence.all_gather, Sequence.reduce_scatter] * 3,
    *(
        Sequence.all_to_all,
        Sequence.coalesced,
        Sequence.send,
        Sequence.objects,
        Sequence.barrier,
        Sequence.wait_for_all,
    ),
]

first, last = map(int, sys.argv[1:])
for seed in range(first, last):
    sequence = Sequence(seed)
    sequence.run()
    wrong = torch.tensor([len(sequence.said)])
    dist.all_reduce(wrong)
    if wrong:
        print("\n".join(sequence.said), flush=True)
        break
else:
    print("all sequences agree", flush=True)
dist.destroy_process_group()
