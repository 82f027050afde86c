"""Random trainings with DDP, FSDP2 and sharded checkpoints: on "cuda", and with gloo on the CPU. Both must have the same weights.

random_trainings.py FIRST LAST FOLDER     the trainings of the seeds FIRST to LAST - 1

All ranks draw the same model and options from the seed. The options are those that programs use: buckets, gradients that
accumulate, parameters without gradients, hooks, meshes of two dimensions, shards that are gathered again or kept. If PyTorch
refuses the options, it must do so on both.
"""

import copy
import datetime
import logging
import random
import shutil
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from seeds import agree, seeds
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")
logging.disable()  # DTensor logs each error and each slow step; nobody reads the pipes of the ranks meanwhile
SIDES = ("cuda", "cpu")
#: What `Training.run` returns if PyTorch refused the options on both sides.
REFUSED = "refused"

dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=200))
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank % torch.cuda.device_count())
folder = Path(sys.argv[3])


class Block(nn.Module):
    """A layer whose second half does not take part in every step."""

    def __init__(self, wide, dropped, kept):
        super().__init__()
        self.norm = nn.LayerNorm(wide)
        self.first, self.second = nn.Linear(wide, wide + 3), nn.Linear(wide + 3, wide, bias=kept)
        self.optional = nn.Linear(wide, wide)
        self.scale = nn.Parameter(torch.ones(()) if dropped else torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))
        self.again = False

    def forward(self, x, more):
        def inner(x):
            return self.second(torch.tanh(self.first(self.norm(x)))) * self.scale

        with torch.no_grad():
            self.seen += x.detach().mean()
        x = x + (checkpoint(inner, x, use_reentrant=False) if self.again else inner(x))
        return x + self.optional(x) if more else x


class Model(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.wide = draw.choice((2, 5, 8))
        self.table = nn.Embedding(7, self.wide)
        zero_dim = draw.random() < 0.3
        self.blocks = nn.ModuleList(
            [Block(self.wide, zero_dim, draw.random() < 0.5) for _ in range(draw.choice((1, 2, 3)))]
        )
        self.out = nn.Linear(self.wide, 7, bias=draw.random() < 0.5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=draw.random() < 0.2)
        if draw.random() < 0.3:
            self.out.weight = self.table.weight  # tied

    def forward(self, ids, more):
        x = self.table(ids)
        for k, block in enumerate(self.blocks):
            x = block(x, more and k % 2 == 0)
        return self.out(x)


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu()


class Training:
    """One training, that both sides do."""

    def __init__(self, seed):
        self.seed, self.draw = seed, random.Random(seed)
        torch.manual_seed(seed)
        self.model = Model(self.draw)
        self.steps = [self.draw.choice((1, 1, 2, 3)) for _ in range(self.draw.choice((2, 4)))]
        self.batch = self.draw.choice((1, 3))
        self.optimizer = self.draw.choice(("sgd", "adamw", "fused"))
        self.clip = self.draw.random() < 0.4
        self.later = self.draw.random() < 0.5  # gradients are freed, or set to zero
        self.options = {}

    def data(self, step, part):
        generator = torch.Generator().manual_seed(self.seed * 1000 + step * 100 + part * 10 + rank)
        return [torch.randint(0, 7, (self.batch, 4), generator=generator) for _ in range(2)]

    def optimizer_of(self, model):
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
        return torch.optim.AdamW(parameters, lr=0.01, fused=self.optimizer == "fused")

    def train(self, side, model, optimizer, syncing, more):
        """`syncing` returns a context: whether this part of a step makes the ranks' gradients the same."""
        losses, norms = [], []
        for step, parts in enumerate(self.steps):
            for part in range(parts):
                ids, wanted = self.data(step, part)
                with syncing(model, part == parts - 1):
                    found = model(ids.to(side), more(step))
                    loss = nn.functional.cross_entropy(found.float().flatten(0, 1), wanted.to(side).flatten()) / parts
                    loss.backward()
                losses.append(loss.detach())
            if self.clip:
                norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.later)
        return [float(loss) for loss in losses], [float(n) for n in norms]

    def ddp(self, side, model):
        o = self.options
        given = {
            "find_unused_parameters": o["find"],
            "gradient_as_bucket_view": o["view"],
            "bucket_cap_mb": o["cap"],
            "static_graph": o["static"],
            "broadcast_buffers": o["buffers"],
        }
        wrapped = DDP(model, **given)
        if o["hook"]:
            wrapped.register_comm_hook(None, o["hook"])
        optimizer = self.optimizer_of(wrapped)

        class Synced:
            def __init__(self, model, last):
                self.context = None if last or o["static"] else model.no_sync()

            def __enter__(self):
                if self.context:
                    self.context.__enter__()

            def __exit__(self, *error):
                if self.context:
                    self.context.__exit__(*error)

        more = (lambda step: step % 2 == 0) if o["find"] and not o["static"] else (lambda step: True)
        said = self.train(side, wrapped, optimizer, Synced, more)
        state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
        return said, state

    def fsdp(self, side, model):
        o = self.options
        shape = o["mesh"]
        mesh = init_device_mesh(side, shape, mesh_dim_names=("replicas", "shards") if len(shape) == 2 else ("shards",))
        how = {"mesh": mesh, "reshard_after_forward": o["reshard"]}
        if o["precision"]:
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if o["placement"]:
            how["shard_placement_fn"] = lambda p: Shard(p.ndim - 1 if p.ndim > 1 and p.shape[-1] % size == 0 else 0)
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False) if o["offload"] else OffloadPolicy()
        for block in model.blocks[:: 1 + o["sparse"]]:
            block.again = o["again"]
            fully_shard(block, **how)
        fully_shard(model, **how)
        if o["prefetch"] and not o["sparse"]:
            for first, second in zip(model.blocks, list(model.blocks)[1:], strict=False):
                first.set_modules_to_forward_prefetch([second])
                second.set_modules_to_backward_prefetch([first])
        optimizer = self.optimizer_of(model)

        class Synced:
            def __init__(self, model, last):
                model.set_requires_gradient_sync(last)
                if o["kept"]:
                    model.set_reshard_after_backward(last)
                if o["unshard"]:
                    model.unshard(async_op=True)

            def __enter__(self):
                pass

            def __exit__(self, *error):
                pass

        said = self.train(side, model, optimizer, Synced, lambda step: True)
        state = {k: whole(v) for k, v in model.state_dict().items()}
        if o["save"]:
            self.save(side, model, optimizer, state)
        return said, state

    def save(self, side, model, optimizer, state):
        """Save the shards, and load them in other shards, and whole."""
        where = folder / f"{self.seed}-{side}"
        parts, rest = get_state_dict(model, optimizer)
        dcp.save({"model": parts, "optimizer": rest}, checkpoint_id=where)
        state = {k: v for k, v in state.items() if not k.endswith("seen")}  # each rank has its own
        names = ("a", "b")
        shape = [(size, 1), (1, size)][self.seed % 2]
        mesh = init_device_mesh(side, shape, mesh_dim_names=names)
        generator = random.Random(self.seed)
        others = {}
        for name, value in state.items():
            placements = [Shard(generator.randrange(value.ndim)) if value.ndim else Replicate(), Replicate()]
            generator.shuffle(placements)
            others[name] = distribute_tensor(torch.full_like(value, 9).to(side), mesh, placements)
        dcp.load({"model": others}, checkpoint_id=where)
        for name, value in state.items():
            assert torch.equal(whole(others[name]), value), (side, name, whole(others[name]), value)
        plain = {name: torch.full_like(value, 9).to(side) for name, value in state.items()}
        dcp.load({"model": plain}, checkpoint_id=where)
        for name, value in state.items():
            assert torch.equal(plain[name].cpu(), value), (side, name)
        again = copy.deepcopy(self.model).to(side)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        fully_shard(again, mesh=init_device_mesh(side, (size,)))
        full, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        set_model_state_dict(again, full if not rank else {}, options=options)
        found = again.state_dict()
        for name, value in state.items():
            assert torch.equal(whole(found[name]), value), (side, name)
        dist.barrier()
        if not rank:
            shutil.rmtree(where)

    def run(self):
        draw = self.draw
        if draw.random() < 0.5:
            self.options = {
                "find": draw.random() < 0.5,
                "view": draw.random() < 0.5,
                "cap": draw.choice((25, 0.0001, 0.001)),
                "static": draw.random() < 0.3,
                "buffers": draw.random() < 0.5,
                "hook": draw.choice((None, None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook)),
            }
            if self.model.frozen.requires_grad:
                self.options["find"] = True
            train = self.ddp
        else:
            self.options = {
                "mesh": draw.choice(((size,), (1, size), (size, 1), *(((2, size // 2),) if size > 3 else ()))),
                "reshard": draw.choice((True, False, None, *((2,) if size > 3 else ()))),
                "precision": draw.random() < 0.3,
                "placement": draw.random() < 0.3,
                "offload": draw.random() < 0.2,
                "sparse": draw.random() < 0.3,
                "prefetch": draw.random() < 0.3,
                "again": draw.random() < 0.3,
                "kept": draw.random() < 0.3,
                "unshard": draw.random() < 0.3,
                "save": draw.random() < 0.4,
            }
            if self.options["reshard"] == 2 and len(self.options["mesh"]) == 2:
                self.options["reshard"] = True
            if self.options["offload"]:
                self.clip = False
            for block in self.model.blocks:  # FSDP2 takes no parameters without dimensions
                if not block.scale.ndim:
                    block.scale = nn.Parameter(torch.ones(1))
            train = self.fsdp
        results = []
        for side in SIDES:
            torch.manual_seed(self.seed)
            try:
                results.append(train(side, copy.deepcopy(self.model).to(side)))
            except Exception as e:
                results.append(f"{type(e).__name__}: {e}"[:400])
                print(f"seed {self.seed}, {side}:", traceback.format_exc(), file=sys.stderr, flush=True)
        return self.difference(train.__name__, results)

    def difference(self, name, results):
        """What differs, if anything does."""
        what = f"seed {self.seed}, rank {rank}, {name} {self.options} {self.optimizer} {self.steps} clip {self.clip}"
        if any(isinstance(r, str) for r in results):
            if type(results[0]) is type(results[1]) and results[0].replace("cuda", "cpu")[:60] == results[1][:60]:
                return REFUSED
            return f"{what}: {results}"
        exact = not self.options.get("precision") and not self.options.get("hook")
        loose = {"rtol": 2e-4, "atol": 1e-5} if exact else {"rtol": 0.05, "atol": 0.02}
        (said, ours), (wanted, theirs) = results
        for mine, other in zip(said, wanted, strict=True):
            if not torch.allclose(torch.tensor(mine), torch.tensor(other), **loose):
                return f"{what}: losses, norms {said}, on the CPU {wanted}"
        for key, value in theirs.items():
            if not torch.allclose(ours[key], value, **loose):
                return f"{what}: {key}: {ours[key]}, on the CPU {value}"
        return ""


refused = []


def check(seed):
    said = Training(seed).run()
    if said != REFUSED:
        return said
    refused.append(seed)
    return ""


agreed = agree(check)
most = 2 * len(refused) > len(seeds())
if agreed:
    print("nearly all were refused" if most else "all trainings agree", len(refused), "refused", flush=True)
dist.destroy_process_group()
sys.exit(most or not agreed)
