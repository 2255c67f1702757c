"""What each process of a two-process engine test does. Imported by forked workers only."""

import copy
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from opendm.errors import EngineError
from opendm.model.dm05.tiny import random_model, tiny_config
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.optimizer.placement import local
from opendm.trainer.engine import (
    Engine,
    assert_sharded,
    autocast,
    free_gathered,
    gather_weights,
    sharded_units,
)
from opendm.trainer.materialize import materialize


def small_model(seed=0):
    return random_model(tiny_config(64, chunk_size=4, num_layers=2, hidden_size=32), seed)


def small_batch(rows):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(13, 64, (rows, 24), generator=generator)
    ids[:, 2:18] = 12
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == 12).long(),
        "pixel_values": torch.randn(rows, 3, 112, 112, generator=generator),
        "action": torch.randn(rows, 4, 32, generator=generator),
        "action_mask": torch.ones(rows, 4, 32, dtype=torch.bool),
        "sample_seed": torch.arange(rows),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """How two steps are trained."""

    name: str
    strategy: str = "shard_grad_op"
    preset: str = "published"
    checkpointing: bool = False
    accumulation: int = 1
    policy: str = ""
    optim: str = "adamw"

    @property
    def engine(self):
        return Engine(
            self.name,
            torch.device("cpu"),
            torch.bfloat16 if self.policy else None,
            self.policy != "fp32_mixed",
            self.strategy,
            self.preset,
            ranks_per_node=2,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What two steps of a case leave behind."""

    record: list
    """Loss and gradient norm by step."""
    description: str
    weights: dict
    num_gathered: int
    """Units with whole weights between forward and backward pass."""
    num_grad_elements: int
    """Of this rank, after the first of a step's backward passes."""
    warnings: list


def build(case, seed=0, *, on_meta=False):
    """The model of a case; under ``bf16_mixed`` in bfloat16, as the released one is loaded."""
    model = small_model(seed).train()
    if case.policy:
        model.set_precision_policy(case.policy)
    if case.policy == "bf16_mixed":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    model.freeze_vlm_embedding()
    if on_meta:
        model.to("meta")
    model.enable_gradient_checkpointing(
        vlm_gradient_checkpointing=case.checkpointing, ae_gradient_checkpointing=case.checkpointing
    )
    return case.engine.wrap(model, model.fsdp_wrap_modules(case.preset))


def train_two_steps(case, rank=0, world_size=1, seed=0, *, on_meta=False):
    """Two steps on the same eight samples, however they are spread."""
    with warnings.catch_warnings(record=True) as caught:
        engine, wrapped = case.engine, build(case, seed, on_meta=on_meta)
        engine.assert_got(wrapped)
        config = DM05OptimizerConfig(optim=case.optim, base_lr=1e-3, weight_decay=0.01)
        optimizer = config.build_optimizer(wrapped)
        mine = {key: value[rank::world_size] for key, value in small_batch(8).items()}
        record, gathered, grad_elements = [], [], []
        for _ in range(2):
            total = torch.zeros(())
            for part in range(case.accumulation):
                batch = {key: value[part :: case.accumulation] for key, value in mine.items()}
                with autocast(engine)():
                    loss = wrapped(**batch).loss / case.accumulation
                gathered.append(num_gathered(wrapped))
                loss.backward()
                grad_elements.append(
                    sum(local(p.grad).numel() for p in wrapped.parameters() if p.grad is not None)
                )
                total += loss.detach()
            norm = engine.clip_grad_norm(wrapped, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world_size > 1:
                dist.all_reduce(total)
                total /= world_size
            record.append((float(total), float(norm)))
        weights = gather_weights(wrapped, keep=rank == 0)
    weights = {key: value.float().numpy() for key, value in weights.items()}
    lines = [str(warning.message) for warning in caught]
    return Outcome(record, engine.describe(wrapped), weights, gathered[0], grad_elements[0], lines)


def train_with_and_without_weights(rank, world_size, cases):
    """By case: bits after two steps where all ranks read weights, and where rank 0 alone does."""
    return {
        case: [
            bits(train_two_steps(case, rank, world_size, on_meta=on_meta))
            for on_meta in (False, rank > 0)
        ]
        for case in cases
    }


def bits(outcome):
    weights = {name: value.tobytes() for name, value in outcome.weights.items()}
    return outcome.record, weights, outcome.warnings


def placed(rank):
    """Storage and values on each rank of what rank 0 alone has, and which marks survived."""
    model = torch.nn.BatchNorm1d(3, dtype=torch.bfloat16)
    model.register_buffer("passing", torch.full((2,), 7.0), persistent=False)
    model.bias.requires_grad_(False)
    model.weight.data.fill_(0.3)
    model.weight.mark = "muon"
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    if rank:
        marks = model.weight.mark
        model.to("meta"), tied.to("meta")
        model.weight.mark = marks
        tied[1].weight = tied[0].weight
    for frozen_too in (False, True):
        module = copy.deepcopy(model)
        module.weight.mark = model.weight.mark
        materialize(module.modules(), torch.device("cpu"), frozen_too=frozen_too)
        yield (
            {
                name: (str(tensor.dtype), tensor.tolist(), tensor.requires_grad)
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            },
            list(module.state_dict()),
            module.weight.mark,
        )
    materialize(tied.modules(), torch.device("cpu"), frozen_too=False)
    yield tied[1].weight is tied[0].weight


def all_placed(rank):
    return list(placed(rank))


def num_gathered(model):
    units = sharded_units(model).values()
    return sum(
        not unit._handle.needs_unshard()
        if isinstance(unit, FullyShardedDataParallel)
        else unit._get_fsdp_state()._fsdp_param_group.is_unsharded
        for unit in units
    )


def train_cases(rank, world_size, cases):
    """An outcome by case, all in one process group."""
    return {case: train_two_steps(case, rank, world_size) for case in cases}


def losses_around_a_change(rank, name, *, free):
    """Loss, loss after every weight was halved, and the loss of a model that starts so."""
    batch, case = small_batch(2), Case(name)
    with torch.no_grad():
        wrapped = build(case)
        shards = list(wrapped.parameters())
        before = wrapped(**batch).loss
        if free:
            free_gathered(wrapped)
        for shard in shards:
            local(shard).mul_(0.5)
        after = wrapped(**batch).loss
        reference = small_model()
        for parameter in reference.parameters():
            parameter.mul_(0.5)
        return float(before), float(after), float(reference(**batch).loss)


def changes(rank):
    """By engine and whether gathered weights are freed: see :func:`losses_around_a_change`."""
    return {
        (name, free): losses_around_a_change(rank, name, free=free)
        for name in ("fsdp1", "fsdp2")
        for free in (True, False)
    }


def train_from_own_seed(rank):
    """As :func:`train_two_steps`, with other weights on every rank."""
    return [train_two_steps(Case(name), rank, 2, seed=rank).record for name in ("fsdp1", "fsdp2")]


def synchronise_by_torch(_rank):
    """What FSDP1 says when it is asked to synchronise a module on the CPU."""
    try:
        FullyShardedDataParallel(
            small_model(), device_id=torch.device("cpu"), sync_module_states=True
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def sharded_linear(size, name, strategy):
    """One unit, wrapped without the engine."""
    model = torch.nn.Linear(size, size)
    if name == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shards",))
        return fully_shard(model, mesh=mesh, reshard_after_forward=strategy == "FULL_SHARD")
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )


def check_assertions(_rank, cases):
    """By case: what ``assert_sharded`` says of a unit when SHARD_GRAD_OP was asked for."""
    said = {}
    for case in cases:
        name, strategy, num_units = case
        engine = Engine(name, torch.device("cpu"), None)
        try:
            assert_sharded(sharded_linear(4, name, strategy), engine, num_units=num_units)
        except EngineError as error:
            said[case] = str(error)
    return said


def gradient_norms(rank):
    """By FSDP version: norm by torch's function, by the engine, and over all ranks by hand."""
    found = {}
    for name in ("fsdp1", "fsdp2"):
        torch.manual_seed(0)
        model = sharded_linear(64, name, "SHARD_GRAD_OP")
        model(torch.ones(1, 64) * (1 + rank)).pow(2).sum().backward()
        own = local(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        whole = Engine(name, torch.device("cpu"), None).clip_grad_norm(model, float("inf"))
        squares = sum(
            local(p.grad).square().sum() for p in model.parameters() if p.grad is not None
        )
        dist.all_reduce(squares)
        found[name] = float(own), float(whole), float(squares.sqrt())
    return found


def mean_gradient(rank):
    """FSDP2's gradient of ``(1 + rank) * w.sum()``, in one process group and as 2-D mesh."""
    model = torch.nn.Linear(3, 2, bias=False)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    return model.weight.grad.full_tensor().tolist()


def train_without_fsdp1(rank):
    """As :func:`train_two_steps` under FSDP2, with a torch that no longer carries FSDP1."""
    del fsdp.FullyShardedDataParallel, fsdp.ShardingStrategy, fsdp.MixedPrecision
    return train_two_steps(Case("fsdp2"), rank, 2).record
