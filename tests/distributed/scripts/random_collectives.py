"""Random sequences of collectives: on "cuda" tensors, and with gloo on the same CPU tensors. Both must have the same values.

random_collectives.py FIRST LAST     the sequences of the seeds FIRST to LAST - 1

All ranks take the same steps, which follow from the seed. Only the numbers, and the order of waits, are a rank's own. Numbers are
small integers, so sums do not depend on the order of the ranks. A tensor is not used while a collective works on it. Gloo has no
booleans and few collectives of complex numbers, so it gets such tensors as bytes and as real numbers.
"""

import datetime
import random
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from seeds import agree

warnings.simplefilter("ignore")
#: Before torch 2.13, `all_gather_tensor` refuses what is not contiguous.
GATHERS_ANY_LAYOUT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
SIDES = ("cuda", "cpu")
NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max", dist.ReduceOp.PRODUCT: "product"}
STEPS, TENSORS = 40, 8

dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=200))
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
#: Groups, each with its ranks.
GROUPS = [(None, tuple(range(size)))]
for members in ((0, size - 1), tuple(range(size))[::2], tuple(range(1, size)), tuple(range(size))):
    if len(members) > 1:
        GROUPS.append((dist.new_group(list(members)), members))
#: A group whose objects travel as tensors of the device.
ON_DEVICE = dist.new_group(backend="nccl")


def gloo(t):
    """A CPU tensor as gloo takes it."""
    return t.view(torch.uint8) if t.dtype is torch.bool else torch.view_as_real(t) if t.is_complex() else t


def as_taken(side, t):
    return gloo(t) if side else t


def operator(side, op, dtype):
    """The sum of booleans is "or" with NCCL, so it is the greatest byte with gloo."""
    return dist.ReduceOp.MAX if side and dtype is torch.bool and op == dist.ReduceOp.SUM else op


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
        host = torch.randint(0 if dtype in (torch.bool, torch.uint8) else -2, 3, shape, generator=self.generator).to(
            dtype
        )
        if dtype.is_complex:
            host = host * (1 + 1j)
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
            self.end(work)

    def end(self, work):
        """Wait for the works of both sides, in one of the ways that programs have."""
        for side, each in enumerate(work):
            if each is not None:
                each.get_future().wait() if not side and self.own.random() < 0.3 else each.wait()

    def call(self, member, function, *pairs):
        """Call a collective on both sides, if this rank is a member of its group. Others draw the same numbers.

        `function` gets the index of the side, and whether to return a work.
        """
        later = self.shared.random() < 0.5
        if not member:
            return
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
        """Take all steps. Returns what differs."""
        for _ in range(3):
            self.make()
        done = []
        for _ in range(STEPS):
            step = self.shared.choice(KINDS)
            done.append(step.__name__)
            step(self)
            if self.shared.random() < 0.2:
                self.compare(" ".join(done[-6:]))
        self.wait()
        self.compare("the end: " + " ".join(done[-8:]))
        return self.said

    # -- steps on one rank --------------------------------------------------------------------------------------------

    def make(self):
        n = self.shared.choice((0, 1, 2, 3, 8, 8, 1000, 40_000))
        shape = self.shared.choice(((n,), (n, 2), (2, n), (n, 1, 3)))
        self.new(self.values(shape, self.shared.choice(DTYPES)))

    def slice(self):
        """A view: a collective on it writes a part of another tensor."""
        pair = self.shared.choice(self.pool)
        if not (n := len(pair[1])):
            return
        first = self.shared.randrange(n)
        last = self.shared.randrange(first, n) + 1
        self.new([t[first:last] for t in pair])

    def write(self):
        pair, kind = self.pick(), self.shared.randrange(4)
        for t in pair:
            if t.dtype is torch.bool or t.is_complex():
                t[:1] = rank % 2
                t.logical_not_() if t.dtype is torch.bool else t.mul_(1j)
            elif kind == 0:
                t.add_(rank + 1).clamp_(-3, 3)
            elif kind == 1:
                t.mul_(2).remainder_(5)
            elif kind == 2:
                t[:1] = rank
            else:
                t.neg_()

    def compute(self):
        pair = self.pick()
        if pair[1].dtype is torch.bool or pair[1].is_complex():
            self.new([t.logical_not() if t.dtype is torch.bool else -t for t in pair])
        else:
            self.new([(t + 1).clamp(-3, 3) for t in pair])

    def read(self):
        pair = self.pick()
        if pair[0].sum().item() != pair[1].sum().item():
            self.said.append(f"seed {self.seed}, rank {rank}: another sum")

    def rest(self):
        """Wait for some work, which is another one on each rank."""
        if self.works:
            work, _ = self.works.pop(self.own.randrange(len(self.works)))
            self.end(work)

    def wait_for_all(self):
        self.wait()

    def small(self, pair):
        """Keep the numbers small: a product of sums must not round."""
        self.wait(pair[1].untyped_storage().data_ptr())
        for t in pair:
            if t.is_complex():
                torch.view_as_real(t).remainder_(3)
            elif t.dtype is not torch.bool:
                t.remainder_(3)

    # -- collectives --------------------------------------------------------------------------------------------------

    def group(self):
        group, members = self.shared.choice(GROUPS)
        return group, members, rank in members

    def all_reduce(self):
        pair, op, (group, _, member) = self.pick(), self.shared.choice(OPS), self.group()
        self.small(pair)
        dtype = pair[1].dtype
        op = dist.ReduceOp.SUM if dtype.is_complex else op

        def reduce(side, later):
            t = pair[side].view(torch.uint8) if side and dtype is torch.bool else pair[side]
            return dist.all_reduce(t, operator(side, op, dtype), group, async_op=later)

        self.call(member, reduce, pair)
        self.settle(pair)

    def settle(self, pair):
        """Wait at once in half of the cases, else before the next use. Ranks outside of the group draw the same numbers."""
        if self.shared.random() < 0.5:
            self.wait(pair[1].untyped_storage().data_ptr())

    def broadcast(self):
        pair, (group, members, member) = self.pick(), self.group()
        source = self.shared.choice(members)
        self.call(
            member, lambda side, later: dist.broadcast(as_taken(side, pair[side]), source, group, async_op=later), pair
        )
        self.settle(pair)

    def all_gather(self):
        pair, (group, members, member) = self.pick(), self.group()
        flat = [t.contiguous() for t in pair]
        found = self.zeros((len(members), *pair[1].shape), pair[1].dtype)
        whole, listed = self.shared.random() < 0.5, self.shared.random() < 0.5

        def gather(side, later):
            out, t = as_taken(side, found[side]), as_taken(side, flat[side])
            if whole and not listed:
                out = out.view(len(members) * t.shape[0], *t.shape[1:])
                return dist.all_gather_into_tensor(out, t, group, async_op=later)
            return dist.all_gather(list(out.unbind()), t, group, async_op=later)

        self.call(member, gather, found, flat)
        self.new(found)
        self.settle(found)

    def reduce(self):
        pair, op, (group, members, member) = self.pick(), self.shared.choice(OPS), self.group()
        root = self.shared.choice(members)
        self.small(pair)
        mine, dtype = [t.clone() for t in pair], pair[1].dtype  # gloo writes the operands of the others, too
        member = member and not (dtype.is_complex or dtype is torch.bool)
        self.call(member, lambda side, later: dist.reduce(mine[side], root, op, group, async_op=later), mine)
        if rank == root:
            self.wait(mine[1].untyped_storage().data_ptr())
            self.same("reduce", mine)

    def same(self, what, pair):
        if not torch.equal(pair[0].cpu(), pair[1]):
            self.said.append(f"seed {self.seed}, rank {rank}, {what}: {pair[0].cpu()}, with gloo {pair[1]}")

    def gather(self):
        pair, (group, members, member) = self.pick(), self.group()
        root, flat = self.shared.choice(members), [t.contiguous() for t in pair]
        found = self.zeros((len(members), *pair[1].shape), pair[1].dtype)

        def gather(side, later):
            out = list(as_taken(side, found[side]).unbind()) if rank == root else None
            return dist.gather(as_taken(side, flat[side]), out, root, group, async_op=later)

        self.call(member, gather, found, flat)
        self.new(found)
        self.settle(found)

    def scatter(self):
        group, members, member = self.group()
        root, dtype, n = self.shared.choice(members), self.shared.choice(DTYPES), self.shared.choice((0, 1, 6, 700))
        found, given = self.zeros((n, 2), dtype), self.values((len(members), n, 2), dtype)

        def scatter(side, later):
            parts = list(as_taken(side, given[side]).unbind()) if rank == root else None
            return dist.scatter(as_taken(side, found[side]), parts, root, group, async_op=later)

        self.call(member, scatter, found, given)
        self.new(found)
        self.settle(found)

    def reduce_scatter(self):
        op, (group, members, member) = self.shared.choice(OPS[:4]), self.group()
        dtype, n = self.shared.choice(DTYPES[:-1]), self.shared.choice((0, 1, 5, 700))
        given, found = self.values((len(members) * n,), dtype), self.zeros((n,), dtype)
        listed = self.shared.random() < 0.3

        def scatter(side, later):
            out, t, how = as_taken(side, found[side]), as_taken(side, given[side]), operator(side, op, dtype)
            if listed and not side:
                return dist.reduce_scatter(
                    out, list(t.split(n) if n else [t] * len(members)), how, group, async_op=later
                )
            return dist.reduce_scatter_tensor(out, t, how, group, async_op=later)

        self.call(member, scatter, found, given)
        self.new(found)
        self.settle(found)

    def all_to_all(self):
        group, members, member = self.group()
        dtype, n = self.shared.choice(DTYPES), len(members)
        most = self.shared.choice((1, 4, 200))
        parts = [[self.shared.randrange(most) for _ in members] for _ in members]
        listed = self.shared.random() < 0.3
        if not member:
            self.shared.random()
            self.make()
            return
        me = members.index(rank)
        sent, taken = parts[me], [row[me] for row in parts]
        given, found = self.values((1 + sum(sent), 2), dtype), self.zeros((2 + sum(taken), 2), dtype)
        given, found = (
            [t[1:] for t in given],
            [t[2:] for t in found],
        )  # views that do not begin where their memory begins
        even = all(k == parts[0][0] for row in parts for k in row) and n == size
        splits = (None, None) if even else (taken, sent)

        def exchange(side, later):
            out, t = as_taken(side, found[side]), as_taken(side, given[side])
            if listed and not side:
                return dist.all_to_all(list(out.split(taken)), list(t.split(sent)), group, async_op=later)
            return dist.all_to_all_single(out, t, *splits, group, async_op=later)

        self.call(True, exchange, found, given)
        self.wait(found[1].untyped_storage().data_ptr())
        self.same("all_to_all", found)
        self.make()

    def uneven_gather(self):
        """Ranks with different numbers of rows, and results in the columns of a table."""
        group, members, member = self.group()
        dtype, rows = self.shared.choice(DTYPES), [self.shared.randrange(5) for _ in members]
        if not member:
            return
        given = self.values((rows[members.index(rank)], 2), dtype)
        found = [torch.zeros(n, 2, dtype=dtype, device="cuda") for n in rows]
        works = dist.all_gather(found, given[0], group, async_op=True)
        wide = torch.zeros(max(rows), 2, dtype=dtype)
        wide[: len(given[1])] = given[1]
        padded = torch.zeros(len(members), max(rows), 2, dtype=dtype)
        dist.all_gather(list(gloo(padded).unbind()), gloo(wide), group)
        columns, mine = (
            torch.zeros(3, len(members), dtype=torch.int64, device="cuda"),
            torch.full((3,), rank, device="cuda"),
        )
        dist.all_gather(list(columns.unbind(1)), mine, group)
        works.wait()
        for n, ours, theirs in zip(rows, found, padded, strict=True):
            self.same("uneven all_gather", (ours, theirs[:n]))
        self.same("all_gather into columns", (columns, torch.tensor([members] * 3)))

    def coalesced(self):
        kind, (group, members, member) = self.shared.randrange(3), self.group()
        sizes, dtype, n = (1, 4, 0, 300), self.shared.choice(DTYPES[:-2]), len(members)
        given = [self.values((k * n,), dtype) for k in sizes]
        found = [self.zeros((k,) if kind == 1 else (k * n * n,), dtype) for k in sizes]
        if kind == 0:
            found = given
        if member:

            def each(side, k):
                out, t = found[k][side], given[k][side]
                if kind == 0:
                    dist.all_reduce(t, group=group)
                elif kind == 1:
                    dist.reduce_scatter_tensor(out, t, group=group)
                else:
                    dist.all_gather_into_tensor(out, t, group=group)

            later = self.shared.random() < 0.5
            with dist._coalescing_manager(group, device=torch.device("cuda"), async_ops=later) as manager:
                for k in range(len(sizes)):
                    each(0, k)
            for k in range(len(sizes)):
                each(1, k)
            if later:
                manager.wait()
        else:
            self.shared.random()
        for pair in found:
            self.new(pair)

    def functional(self):
        """The collectives of compiled programs and of DTensor, whose results wait for themselves."""
        kind, (group, members, member) = self.shared.randrange(5), self.group()
        op, dtype, n = NAMES[self.shared.choice(OPS[:4])], self.shared.choice(DTYPES[:8]), len(members)
        shape = [self.shared.choice((1, 2, 3)) * n, self.shared.choice((1, 2)) * n]
        dim, rows = self.shared.randrange(2), [[self.shared.randrange(4) for _ in members] for _ in members]
        if not member:
            return
        group = group or dist.group.WORLD
        me = members.index(rank)
        given = self.values(shape if kind != 3 else (sum(rows[me]), 2), dtype)
        if self.own.random() < 0.5 and kind != 3:
            given = [t.t().contiguous().t() for t in given]  # dense, in another order
        found = []
        for t in given:
            if kind == 0:
                found.append(functional.all_reduce(t, op, group))
            elif kind == 1:
                found.append(functional.all_gather_tensor(t if GATHERS_ANY_LAYOUT else t.contiguous(), dim, group))
            elif kind == 2:
                found.append(functional.reduce_scatter_tensor(t, op, dim, group))
            elif kind == 3:
                found.append(functional.all_to_all_single(t, [row[me] for row in rows], rows[me], group))
            else:
                found.append(functional.broadcast(t, self.seed % n, group))
        if self.own.random() < 0.5:
            found = [t.view(-1) for t in found]
        self.same(f"functional {kind}", [t + 0 for t in found])

    def point_to_point(self):
        """Messages in one order that all ranks keep. A rank waits for its own in its order."""
        messages = [self.shared.sample(range(size), 2) for _ in range(self.shared.randrange(1, 6))]
        dtypes = [self.shared.choice(DTYPES) for _ in messages]
        sizes = [self.shared.choice((0, 1, 7, 3000)) for _ in messages]
        batched = self.shared.random() < 0.5
        order = list(range(len(messages)))
        pairs = [self.values((n, 2), dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
        found = [self.zeros((n, 2), dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
        if batched:  # the order counts only between two ranks in one direction
            rest = {}
            for k in order:
                rest.setdefault(tuple(messages[k]), []).append(k)
            order = []
            while rest:
                way = self.own.choice(list(rest))
                order.append(rest[way].pop(0))
                if not rest[way]:
                    del rest[way]
        mine = [k for k in order if rank in messages[k]]
        for side in (0, 1):
            ops = []
            for k in mine if not side else sorted(mine):
                source, to = messages[k]
                if rank == source:
                    ops.append((dist.isend, as_taken(side, pairs[k][side]), to))
                else:
                    ops.append((dist.irecv, as_taken(side, found[k][side]), source))
            if batched and not side and ops:
                works = dist.batch_isend_irecv([dist.P2POp(*op) for op in ops])
            else:
                works = [call(t, peer) for call, t, peer in ops]
            self.own.shuffle(works)
            for work in works:
                work.wait()
        for pair in found:
            self.same("a message", pair)
        self.new(found[0])

    def loss(self):
        """Numbers without a shape, as programs average their losses."""
        pair, (group, members, member) = self.values((5,), torch.float32), self.group()
        if not member:
            return
        losses = [t.sum() for t in pair]
        for t in losses:
            dist.all_reduce(t, group=group)
        found = [torch.zeros(len(members), device=side) for side in SIDES]
        for whole, t in zip(found, losses, strict=True):
            dist.all_gather(list(whole.unbind()), t, group)
        if losses[0].item() != losses[1].item():
            self.said.append(f"seed {self.seed}, rank {rank}: another loss")
        self.same("losses", found)

    def objects(self):
        found = [None] * size
        dist.all_gather_object(found, {"rank": rank, "seed": self.seed})
        if found != [{"rank": r, "seed": self.seed} for r in range(size)]:
            self.said.append(f"seed {self.seed}, rank {rank}: objects {found}")

    def objects_on_the_device(self):
        kind, source = self.shared.randrange(4), self.shared.randrange(size)
        object_ = {"seed": self.seed, "more": [1.5] * self.shared.choice((0, 1, 5000))}
        one, all_of_them = [object_ if rank == source else None], [None] * size
        if kind == 0:
            dist.broadcast_object_list(one, source, ON_DEVICE)
        elif kind == 1:
            dist.scatter_object_list(one, [object_] * size if rank == source else None, source, ON_DEVICE)
        elif kind == 2:
            dist.gather_object(object_, all_of_them if rank == source else None, source, ON_DEVICE)
            one = all_of_them if rank == source else [object_]
        else:
            dist.all_gather_object(all_of_them, object_, ON_DEVICE)
            one = all_of_them
        if any(each != object_ for each in one):
            self.said.append(f"seed {self.seed}, rank {rank}: objects {one}")

    def barrier(self):
        group, _, member = self.group()
        if member:
            dist.barrier(group)


KINDS = [
    *[Sequence.make, Sequence.slice, Sequence.write, Sequence.write, Sequence.compute, Sequence.read, Sequence.rest]
    * 2,
    *[Sequence.all_reduce, Sequence.broadcast, Sequence.all_gather, Sequence.reduce_scatter] * 3,
    *[Sequence.functional, Sequence.point_to_point, Sequence.all_to_all] * 2,
    *(Sequence.reduce, Sequence.gather, Sequence.scatter, Sequence.coalesced, Sequence.uneven_gather, Sequence.loss),
    *(Sequence.objects, Sequence.objects_on_the_device, Sequence.barrier, Sequence.wait_for_all),
]

agreed = agree(lambda seed: "\n".join(Sequence(seed).run()))
if agreed:
    print("all sequences agree", flush=True)
dist.destroy_process_group()
sys.exit(not agreed)
