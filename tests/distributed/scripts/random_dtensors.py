"""Random programs of DTensor: on a mesh of "cuda" devices, and on the same mesh of CPUs. Both must have the same values.

random_dtensors.py FIRST LAST     the programs of the seeds FIRST to LAST - 1

All ranks take the same steps, which follow from the seed. Numbers are small integers, so sums do not depend on the order of the
ranks. If an operator refuses its operands, it must do so on both.
"""

import datetime
import logging
import math
import random
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensors
from seeds import agree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

warnings.simplefilter("ignore")
logging.disable()  # DTensor logs each error and each slow step; nobody reads the pipes of the ranks meanwhile
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32)
SIDES = ("cuda", "cpu")
STEPS, TENSORS = 24, 6

dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=200))
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
SHAPES = [(size,), (1, size), (size, 1), *([(2, size // 2)] if size % 2 == 0 and size > 2 else [])]
#: Meshes, each of "cuda" devices and of CPUs. The last has the ranks in another order.
MESHES = [[DeviceMesh(side, torch.arange(size).reshape(shape)) for side in SIDES] for shape in SHAPES]
MESHES.append([DeviceMesh(side, torch.arange(size).flip(0)) for side in SIDES])


class Sequence:
    """One program: pairs of tensors (on "cuda", on the CPU), and steps that make others of them."""

    def __init__(self, seed):
        self.seed, self.random = seed, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.pool, self.said, self.done = [], [], []

    def say(self, what):
        self.said.append(f"seed {self.seed}, rank {rank}: {' '.join(self.done[-5:])}: {what}")

    def placements(self, mesh, n):
        return [
            Shard(self.random.randrange(n)) if n and self.random.random() < 0.6 else Replicate()
            for _ in range(mesh.ndim)
        ]

    def values(self, shape, dtype):
        return torch.randint(-2, 3, shape, generator=self.generator).to(dtype)

    def pick(self):
        return self.random.choice(self.pool)

    def new(self, function, *pairs):
        """Add the results of a step on both sides, if they are any and not too large."""
        found = []
        for k, operands in enumerate(zip(*pairs, strict=True) if pairs else [(), ()]):
            try:
                found.append(function(k, *operands))
            except Exception as e:
                found.append(f"{type(e).__name__}: {e}".replace("cuda", "cpu").replace(f"cpu:{rank}", "cpu")[:300])
        if any(isinstance(each, str) for each in found):
            if found[0] != found[1]:
                self.say(f"{found[0]}; on the CPU {found[1]}")
            return
        self.compare(found)
        if found[1].numel() <= 20_000:
            self.pool.append(found)
            if len(self.pool) > TENSORS:
                self.pool.pop(self.random.randrange(len(self.pool)))

    def compare(self, pair):
        ours, theirs = pair
        if ours.placements != theirs.placements or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            self.say(
                f"{ours.placements} {ours.shape} {ours.dtype}; on the CPU {theirs.placements} {theirs.shape} {theirs.dtype}"
            )
            return
        mine, other = ours.to_local(), theirs.to_local()
        if mine.shape != other.shape or not torch.equal(mine.cpu(), other):
            self.say(f"{ours.placements} {mine}; on the CPU {other}")

    def run(self):
        """Take all steps. Returns what differs."""
        for _ in range(3):
            self.make()
        for _ in range(STEPS):
            step = self.random.choice(KINDS)
            self.done.append(step.__name__)
            step(self)
        self.done.append("the end")
        for pair in self.pool:
            whole = [t.full_tensor() for t in pair]
            if not torch.equal(whole[0].cpu(), whole[1]):
                self.say(f"whole {whole}")
        return self.said

    # -- steps --------------------------------------------------------------------------------------------------------

    def make(self):
        meshes = self.random.choice(MESHES)
        shape = [self.random.choice((0, 1, 2, 3, 4, 5, 7, 8)) for _ in range(self.random.choice((1, 2, 2, 3)))]
        host, placements = self.values(shape, self.random.choice(DTYPES)), self.placements(meshes[0], len(shape))
        self.new(lambda k: distribute_tensor(host.to(SIDES[k]), meshes[k], placements))

    def partial(self):
        meshes, kind = self.random.choice(MESHES), self.random.choice(("sum", "sum", "max", "min"))
        shape = [self.random.choice((1, 3, 4, 8)) for _ in range(2)]
        host = self.values(shape, self.random.choice(DTYPES[:3])) + rank
        placements = [Partial(kind) if self.random.random() < 0.7 else Replicate() for _ in range(meshes[0].ndim)]
        if not all(isinstance(p, Partial) for p in placements):
            placements = [Partial(kind)] * len(placements)
        self.new(lambda k: DTensor.from_local(host.to(SIDES[k]), meshes[k], placements, run_check=False))

    def parts(self):
        """Parts that the ranks have made themselves, of the same size."""
        meshes = self.random.choice(MESHES)
        dim, host = self.random.randrange(2), self.values((2, 3), torch.float32) + rank
        placements = [Shard(dim) if k == 0 else Shard(1 - dim) for k in range(meshes[0].ndim)]
        self.new(lambda k: DTensor.from_local(host.to(SIDES[k]), meshes[k], placements, run_check=False))

    def redistribute(self):
        pair, later = self.pick(), self.random.random() < 0.5
        placements = self.placements(pair[0].device_mesh, pair[0].ndim)
        self.new(lambda _, t: t.redistribute(placements=placements, async_op=later), pair)

    def one(self):
        pair, kind = self.pick(), self.random.randrange(12)
        dims = list(range(pair[0].ndim))
        self.random.shuffle(dims)
        dim = dims[0] if dims else 0
        if kind in (4, 11) and any(p.is_shard(dim) for p in pair[0].placements):
            return  # a rank may have no elements, and then it alone refuses them
        functions = (
            lambda t: t.neg(),
            lambda t: (t + 1).clamp(-3, 3),
            lambda t: t.sum(dim) if dims else t.sum(),
            lambda t: t.sum(),
            lambda t: t.amax(dim),
            lambda t: t.permute(dims),
            lambda t: t.flatten(),
            lambda t: t.unsqueeze(dim),
            lambda t: t.to(torch.float32),
            lambda t: t.cumsum(dim),
            lambda t: t[:1] if dims else t,
            lambda t: t.argmax(dim),
        )
        self.new(lambda _, t: functions[kind](t).clamp(-50, 50), pair)

    def two(self):
        pair, kind = self.pick(), self.random.randrange(4)
        others = [p for p in self.pool if p[0].device_mesh == pair[0].device_mesh]
        other = self.random.choice(others)
        functions = (
            lambda a, b: a + b,
            lambda a, b: a * b,
            lambda a, b: torch.maximum(a, b),
            lambda a, b: torch.where(a > b, a, b),
        )
        self.new(lambda _, a, b: functions[kind](a, b).clamp(-50, 50), pair, other)

    def matmul(self):
        pair = self.pick()
        if pair[0].ndim != 2 or pair[0].dtype is torch.bfloat16:
            return
        n, meshes = self.random.choice((1, 3, 4)), [t.device_mesh for t in pair]
        host, placements = self.values((pair[0].shape[1], n), pair[0].dtype), self.placements(meshes[0], 2)
        self.new(lambda k, t: (t @ distribute_tensor(host.to(SIDES[k]), meshes[k], placements)).clamp(-50, 50), pair)

    def list_of(self):
        pair, kind = self.pick(), self.random.randrange(3)
        dim = self.random.randrange(max(pair[0].ndim, 1))
        functions = (
            lambda t: torch.cat([t, t + 1], dim),
            lambda t: torch.stack([t, t], dim),
            lambda t: t.split(1, dim)[0],
        )
        self.new(lambda _, t: functions[kind](t), pair)

    def write(self):
        """An operator that writes a tensor. The others of the pool have their own memory or show the change."""
        pair, kind = self.pick(), self.random.randrange(3)
        errors = []
        for t in pair:
            try:
                t.add_(1) if kind == 0 else t.mul_(2) if kind == 1 else t.clamp_(-3, 3)
                errors.append("")
            except Exception as e:
                errors.append(type(e).__name__)
        if errors[0] != errors[1]:
            self.say(f"writes: {errors}")
        self.compare(pair)

    def gradients(self):
        pair = self.pick()
        if not pair[0].dtype.is_floating_point or not pair[0].ndim:
            return
        placements, other = (self.placements(pair[0].device_mesh, pair[0].ndim) for _ in range(2))
        wanted = [t.detach().redistribute(placements=placements).clone().requires_grad_() for t in pair]

        def gradient(_, t):
            y = t.redistribute(placements=other) * 2
            (y * y).sum().full_tensor().backward()
            return t.grad

        self.new(gradient, wanted)

    def whole(self):
        pair = self.pick()
        found = [t.full_tensor() for t in pair]
        if not torch.equal(found[0].cpu(), found[1]):
            self.say(f"whole: {found}")

    def random_numbers(self):
        """Random numbers of a sharded tensor: a replica is equal everywhere, and the parts are those of the whole."""
        mesh = self.random.choice(MESHES)[0]
        if (mesh.mesh.flatten() != torch.arange(size)).any():
            return
        shape = [self.random.choice((2, 4, 5, 8)) for _ in range(2)]
        placements, kind = self.placements(mesh, 2), self.random.randrange(3)
        make = (
            lambda: dtensors.randn(*shape, device_mesh=mesh, placements=placements),
            lambda: dtensors.rand(*shape, device_mesh=mesh, placements=placements),
            lambda: torch.nn.functional.dropout(dtensors.ones(*shape, device_mesh=mesh, placements=placements), 0.5),
        )[kind]
        found = []
        for _ in range(2):
            torch.manual_seed(self.seed)
            found += [make().full_tensor().cpu(), make().full_tensor().cpu()]
        if not torch.equal(found[0], found[2]) or not torch.equal(found[1], found[3]):
            self.say(f"a seed does not repeat {placements}: {found}")
        first = shape.copy()  # the shape of the first shard
        for n, placement in enumerate(placements):
            if placement.is_shard():
                first[placement.dim] = -(-first[placement.dim] // mesh.size(n))
        # PyTorch rounds the offset of a shard up to a multiple of 4, so that smaller shards begin with the same numbers.
        apart = math.prod(first) % 4 == 0
        if kind < 2 and apart and (found[0].unique().numel() < found[0].numel() or torch.equal(found[0], found[1])):
            self.say(f"numbers of {placements} are not random: {found[:2]}")
        everywhere = [torch.empty_like(found[1]) for _ in range(size)]
        dist.all_gather(everywhere, found[1].contiguous())
        if any(not torch.equal(each, found[1]) for each in everywhere):
            self.say(f"ranks have other random numbers of {placements}: {everywhere}")


KINDS = [
    *[Sequence.make, Sequence.redistribute, Sequence.redistribute, Sequence.one, Sequence.two] * 2,
    *(Sequence.partial, Sequence.parts, Sequence.matmul, Sequence.list_of, Sequence.write, Sequence.gradients),
    *(Sequence.whole, Sequence.random_numbers),
]

agreed = agree(lambda seed: "\n".join(Sequence(seed).run()))
if agreed:
    print("all programs agree", flush=True)
dist.destroy_process_group()
sys.exit(not agreed)
