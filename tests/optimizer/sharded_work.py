"""What each process of a sharded optimizer test does. Imported by forked workers, too.

Positions of pieces are found without the optimizer: every weight first holds its own index.
"""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import message_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from opendm.optimizer import (
    MuonAdamW,
    load_optimizer_state,
    mark_muon_parameters,
    save_optimizer_state,
)

HOST_READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal")
COLLECTIVES = (
    "all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "broadcast", "reduce_scatter_tensor", "barrier", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "gather", "scatter", "reduce",
)  # fmt: skip


class Block(nn.Module):
    """Matrices of odd shapes, a norm and biases."""

    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(cols, rows) for rows, cols in shapes)
        self.norm = nn.LayerNorm(7)


def build(blocks, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(shapes) for shapes in blocks)).to(dtype)


def is_matrix(name, param):
    return param.ndim == 2


def is_plainly_cut_matrix(name, param):
    return param.ndim == 2 and not name.startswith("0.layers.2.")


def wrap(model, engine):
    """The model under an engine: a name, and for some what is cut how."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine.startswith("fsdp1"):
        strategy = engine.partition(":")[2] or "SHARD_GRAD_OP"
        groups = None
        if strategy == "HYBRID_SHARD":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
            groups = (mesh.get_group("shards"), mesh.get_group("copies"))
        options = {
            "sharding_strategy": ShardingStrategy[strategy],
            "process_group": groups,
            "use_orig_params": True,
            "device_id": torch.device("cpu"),
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The `NO_SHARD`", category=FutureWarning)
            for index, block in enumerate(model):
                model[index] = FullyShardedDataParallel(block, **options)
            return FullyShardedDataParallel(model, **options)
    if engine in ("fsdp2", "hsdp"):
        shape = (world,) if engine == "fsdp2" else (2, world // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if engine == "fsdp2 and tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0.layers.2": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    if engine == "tp":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        for block in model:
            plan = {
                f"layers.{k}": ColwiseParallel() if k % 2 == 0 else RowwiseParallel()
                for k in range(len(block.layers))
            }
            parallelize_module(block, mesh, plan)
        return model
    return model


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").replace("module.", "")


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(param, values):
    """Set the local part of a parameter to ``values[position]``."""
    with torch.no_grad():
        local(param).copy_(values)


def set_grad(param, values):
    if values is None:
        param.grad = None
    elif isinstance(param, DTensor):
        param.grad = DTensor.from_local(
            values, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )
    else:
        param.grad = values


def indexed(blocks, engine, dtype=torch.float32):
    """The wrapped model, the positions of local elements by name, and its first weights."""
    model = build(blocks)
    initial = {name: param.detach().clone().flatten() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view_as(param))
    wrapped = wrap(model, engine)
    positions = {
        clean(name): local(param.detach()).long().clone()
        for name, param in wrapped.named_parameters()
    }
    for name, param in wrapped.named_parameters():
        fill(param, initial[clean(name)][positions[clean(name)]])
    return wrapped.to(dtype), positions, initial


def gradient(name, numel, step, scenario):
    """The whole gradient of a step, flat; None where there is none."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    grad = torch.randn(numel, generator=generator) * 10.0 ** ((step % 7) - 3)
    if scenario == "faults":
        if name == "0.layers.1.weight" and step % 5 == 2:
            grad[numel // 2] = float("inf")
        if name == "1.layers.0.weight" and step % 4 == 1:
            return None
        if name == "0.layers.0.weight" and step % 6 == 3:
            grad.zero_()
    return grad


def sees(name, step, scenario, rank):
    """Whether a rank gets the gradient at all."""
    return not (scenario == "lonely" and name.endswith("layers.0.weight") and (rank + step) % 2)


def train(
    rank,
    blocks,
    engine,
    num_steps=20,
    scenario="plain",
    dtype=torch.float32,
    grad_of=None,
    first_step=0,
    start=None,
    save=None,
    **options,
):
    """Steps with the same gradients on every engine: local positions, weights, momenta; counters.

    ``start(model, optimizer, positions)`` loads what ``save(model, optimizer)`` wrote at the end.
    """
    model, positions, initial = indexed(blocks, engine, dtype)
    groups_before = num_groups()
    options = {"predicate": is_matrix, **options}
    optimizer = MuonAdamW(model, lr=0.01, weight_decay=0.1, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n + first_step))
    if start is not None:
        start(model, optimizer, positions)
    counted = Counter()
    for step in range(first_step, first_step + num_steps):
        for name, param in model.named_parameters():
            grad = gradient(clean(name), initial[clean(name)].numel(), step, scenario)
            grad = grad if grad_of is None else grad_of(clean(name), step, grad)
            if grad is not None and not sees(clean(name), step, scenario, rank):
                grad = None
            piece = None if grad is None else grad[positions[clean(name)]].to(param.dtype)
            set_grad(param, piece)
        with counted:
            optimizer.step()
        scheduler.step()
    pieces = {}
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        pieces[clean(name)] = (
            positions[clean(name)].numpy(),
            local(param.detach()).float().numpy(),
            local(state["exp_avg"]).numpy(),
        )
    if save is not None:
        save(model, optimizer)
    plan = optimizer.plans[0]
    counters = {
        "orthogonalized": optimizer.num_orthogonalized,
        "skipped": optimizer.skipped_matrices,
        "groups_added": num_groups() - groups_before,
        "collectives": counted.collectives,
        "other_collectives": counted.others,
        "host_reads": counted.host_reads,
        "buckets": len(plan.buckets),
        "plans": len(optimizer.plans),
        "intervals": plan.intervals,
        "shapes": plan.shapes,
        "owners": plan.owners,
    }
    return pieces, counters


def num_groups():
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


class Counter(TorchDispatchMode):
    """Counts collectives and reads by the host."""

    def __init__(self):
        super().__init__()
        self.collectives = 0
        self.others = []
        self.host_reads = []

    def __enter__(self):
        self.saved = {name: vars(dist)[name] for name in COLLECTIVES}
        for name, function in self.saved.items():
            setattr(dist, name, self.counting(name, function))
        return super().__enter__()

    def __exit__(self, *args):
        for name, function in self.saved.items():
            setattr(dist, name, function)
        return super().__exit__(*args)

    def counting(self, name, function):
        def call(*args, **kwargs):
            if name == "all_to_all_single":
                self.collectives += 1
            else:
                self.others.append(name)
            return function(*args, **kwargs)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if name in HOST_READS:
            self.host_reads.append(name)
        if func.name().startswith("c10d") and "alltoall" not in name:
            self.others.append(name)
        return func(*args, **(kwargs or {}))


def train_cases(rank, cases):
    """Several cases in one set of processes."""
    return [train(rank, *case["args"], **case["options"]) for case in cases]


def save_by_name(rank, blocks, engine, folder):
    """Three steps, saved."""
    return train(rank, blocks, engine, 3, save=lambda _, opt: save_optimizer_state(opt, folder))


def load_by_name(rank, blocks, engine, folder, weights):
    """Two more steps from the saved state, and the whole weights by name."""
    return train(
        rank, blocks, engine, 2, first_step=3, start=loader(weights, load_optimizer_state, folder)
    )


def loader(weights, load, folder):
    def start(model, optimizer, positions):
        for name, param in model.named_parameters():
            values = torch.from_numpy(weights[clean(name)]).flatten()
            fill(param, values[positions[clean(name)]])
        load(optimizer, folder)

    return start


def state_dict_round_trip(rank, blocks, engine, weights, folder):
    """Three steps, the rank's own ``state_dict`` into a new optimizer, two more steps."""
    kept = {}

    def keep(model, optimizer):
        torch.save(optimizer.state_dict(), f"{folder}/{engine}-{rank}.pt")

    def load(optimizer, _):
        optimizer.load_state_dict(torch.load(f"{folder}/{engine}-{rank}.pt", weights_only=True))

    train(rank, blocks, engine, 3, save=keep)
    return train(rank, blocks, engine, 2, first_step=3, start=loader(weights, load, kept))


def dcp_save(rank, blocks, folder):
    """Three steps under FSDP2, saved by torch's distributed checkpoint."""

    def save(model, optimizer):
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)

    return train(rank, blocks, "fsdp2", 3, save=save)


def dcp_load(rank, blocks, folder, weights):
    """Two more steps under FSDP2 on another number of ranks."""

    def start(model, optimizer, positions):
        loader(weights, lambda *_: None, folder)(model, optimizer, positions)
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optim"])

    return train(rank, blocks, "fsdp2", 2, first_step=3, start=start)


def refusals(rank, blocks):
    """What each impossible case says on this rank."""
    said = {}
    model = wrap(build(blocks), "fsdp1")
    optimizer = MuonAdamW(model, predicate=is_matrix)
    said["optim_state_dict"] = message_of(
        lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer)
    )
    said["dcp of fsdp1"] = message_of(lambda: get_optimizer_state_dict(model, optimizer))
    linear = FullyShardedDataParallel(
        nn.Linear(8, 8), use_orig_params=True, device_id=torch.device("cpu")
    )
    unsynced = MuonAdamW(linear, predicate=is_matrix)
    with linear.no_sync():
        linear(torch.ones(1, 8)).sum().backward()
    said["no_sync"] = message_of(unsynced.step)
    hidden = FullyShardedDataParallel(build(blocks), device_id=torch.device("cpu"))
    said["hidden"] = message_of(lambda: MuonAdamW(hidden, predicate=is_matrix))
    said["nothing"] = message_of(lambda: MuonAdamW(model, predicate=lambda n, p: False))
    said["one rank selects nothing"] = message_of(
        lambda: MuonAdamW(model, predicate=lambda n, p: p.ndim == 2 and rank != 2)
    )
    said["lonely matrix"] = message_of(
        lambda: MuonAdamW(model, predicate=lambda n, p: p.ndim == 2 and (rank == 0 or "0.l" in n))
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = build(blocks)
    parallelize_module(both, mesh["tp"], {"0.layers.2": ColwiseParallel()})
    fully_shard(both, mesh=mesh["dp"])
    said["strided"] = message_of(lambda: MuonAdamW(both, predicate=is_matrix))
    bare = wrap(build(blocks), "fsdp1")
    named = list(bare.named_parameters())
    for _, param in named:
        vars(param)["_opendm_muon_shape"] = (1000, 1000)
    said["incomplete"] = message_of(lambda: MuonAdamW(named[:1]))
    return said


def marked_parameters(rank, blocks):
    """A step of an optimizer that never saw the sharded model, and of one that did."""
    weights = []
    for give_model in (True, False):
        model = build(blocks)
        mark_muon_parameters(model, is_matrix)
        wrapped = wrap(model, "fsdp1")
        torch.manual_seed(1)
        for param in wrapped.parameters():
            param.grad = torch.ones_like(param) * torch.arange(param.numel())
        optimizer = MuonAdamW(wrapped if give_model else wrapped.named_parameters(), lr=0.1)
        optimizer.step()
        weights.append([param.detach().numpy() for param in wrapped.parameters()])
    return weights, optimizer.describe()
