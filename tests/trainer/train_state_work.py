"""What each process of a training-state test does. Imported by forked workers, too.

Positions of pieces are found without the code under test: every weight first holds its own index.
"""

import logging
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ranks import message_of
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from sharded_work import clean, gradient, indexed, is_matrix, local, set_grad, wrap

from opendm.optimizer import MuonAdamW
from opendm.trainer.train_state import load_train_state, save_train_state

BLOCKS = [[(6, 5), (4, 9), (7, 7)], [(5, 6), (9, 4), (3, 2)]]
FROZEN = "1.layers.2.weight"
UNUSED = "1.layers.2.bias"
OPTIMIZERS = ("adamw", "muon")
BY_WORLD = {
    1: ("single",),
    2: ("ddp", "fsdp1:SHARD_GRAD_OP", "fsdp1:FULL_SHARD", "fsdp2", "tp"),
    3: ("fsdp1", "fsdp2"),
    4: ("fsdp1", "fsdp1:HYBRID_SHARD", "hsdp"),
}


class Run:
    """A model under an engine, its optimizer, schedule and average."""

    def __init__(self, engine, optim, rate=0.01):
        self.model, self.positions, self.initial = indexed(BLOCKS, engine)
        for name, param in self.model.named_parameters():
            param.requires_grad_(clean(name) != FROZEN)
        params = [param for param in self.model.parameters() if param.requires_grad]
        options = {"lr": rate, "betas": (0.8, 0.9), "weight_decay": 0.1}
        self.optimizer = (
            torch.optim.AdamW(params, **options)
            if optim == "adamw"
            else MuonAdamW(self.model, predicate=is_matrix, **options)
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.ema = {name: param.detach().clone() for name, param in self.trainable().items()}

    def trainable(self):
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def train(self, steps):
        for step in steps:
            for name, param in self.model.named_parameters():
                position = self.positions[clean(name)]
                grad = gradient(clean(name), self.initial[clean(name)].numel(), step, "plain")
                no_grad = clean(name) in (FROZEN, UNUSED) or not position.numel()
                set_grad(param, None if no_grad else grad[position])
            self.optimizer.step()
            self.scheduler.step()
            with torch.no_grad():
                for name, param in self.trainable().items():
                    local(self.ema[name]).lerp_(local(param), 0.25)

    def scramble(self):
        """Other values everywhere, as of a run that has gone elsewhere."""
        with torch.no_grad():
            for param in self.trainable().values():
                local(param).add_(1)
            for tensor in self.ema.values():
                local(tensor).zero_()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                local(tensor).fill_(7)
        for group in self.optimizer.param_groups:
            group.update({"lr": 5.0, "betas": (0.1, 0.2), "weight_decay": 3.0})

    def save(self, folder, counters):
        save_train_state(folder, self.model, self.optimizer, self.scheduler, counters, ema=self.ema)

    def load(self, folder, **options):
        return load_train_state(
            folder, self.model, self.optimizer, self.scheduler, ema=self.ema, **options
        )

    def values(self):
        """By name and key: positions in the whole and values, or a scalar."""
        found = {}
        for name, param in self.model.named_parameters():
            position = self.positions[clean(name)]
            if not position.numel():
                continue
            tensors = {"weight": param.detach(), **self.optimizer.state.get(param, {})}
            if name in self.ema:
                tensors["ema"] = self.ema[name]
            for key, tensor in tensors.items():
                held = local(tensor)
                is_scalar = held.ndim == 0
                found[clean(name), key] = (
                    None if is_scalar else position.numpy().copy(),
                    held.numpy().copy(),
                )
        return found

    def settings(self):
        """Options by name of the parameter, and the schedule."""
        names = {param: clean(name) for name, param in self.model.named_parameters()}
        kept = ("lr", "initial_lr", "betas", "eps", "weight_decay")
        options = {
            names[param]: {key: group[key] for key in kept}
            for group in self.optimizer.param_groups
            for param in group["params"]
        }
        schedule = self.scheduler.state_dict()
        return options, schedule["last_epoch"], schedule["_last_lr"][0], schedule["base_lrs"][0]


def whole_run(optim, num_steps):
    """Whole values of an uninterrupted run in one process, and its settings."""
    run = Run("single", optim)
    run.train(range(num_steps))
    return {key: value for key, (_, value) in run.values().items()}, run.settings()


def num_wrong(run, whole):
    """Elements that differ from the whole ones in any bit, and names or keys that differ."""
    values, settings = whole
    mine = run.values()
    wrong = sum(
        int(np.count_nonzero(held != (values[key] if at is None else values[key].flat[at])))
        for key, (at, held) in mine.items()
    )
    held_names = {name for name, _ in mine}
    wanted = {key for key in values if key[0] in held_names}
    return wrong, len(wanted ^ mine.keys()), int(run.settings() != settings)


def save_all(rank, root, world_size):
    """Three steps under every engine of a world size, saved."""
    for engine in BY_WORLD[world_size]:
        for optim in OPTIMIZERS:
            run = Run(engine, optim)
            run.train(range(3))
            run.save(root / f"{engine}-{world_size}-{optim}", {"step": 3, "engine": engine})


def load_all(rank, root, world_size, wholes, later):
    """Each saved folder under every engine: what differs at once, and after two more steps."""
    found = {}
    for engine in BY_WORLD[world_size]:
        for optim in OPTIMIZERS:
            run = Run(engine, optim, rate=0.5)
            for folder in sorted(root.glob(f"*-{optim}")):
                run.scramble()
                counters = run.load(folder)
                assert folder.name.startswith(counters["engine"])
                found[engine, folder.name] = num_wrong(run, wholes[optim])
            run.train(range(3, 5))
            found[engine, optim, "continued"] = num_wrong(run, later[optim])
    return found


def gathered(engine, root):
    """What is said while weights are whole, as after a forward pass, and when they are not."""
    linear = torch.nn.Linear(3, 5)
    if engine == "fsdp1":
        model = wrap(torch.nn.Sequential(linear), "fsdp1:SHARD_GRAD_OP")
    else:
        model = fully_shard(linear, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    rest = (model, optimizer, schedule)
    said = {"before": message_of(lambda: save_train_state(root / engine, *rest, {}))}
    loss = model(torch.ones(1, 3)).sum()
    said["save"] = message_of(lambda: save_train_state(root / "gathered", *rest, {}))
    said["load"] = message_of(lambda: load_train_state(root / engine, *rest))
    loss.backward()
    said["after"] = message_of(lambda: save_train_state(root / engine, *rest, {}))
    return {(engine, case): text for case, text in said.items()}


def failures(rank, root):
    """What each rank is told when one of them cannot save, and when weights are gathered."""
    said = {}
    run = Run("fsdp1:SHARD_GRAD_OP", "adamw")
    run.train(range(1))
    if rank == 1:
        run.optimizer.state[next(iter(run.trainable().values()))]["odd"] = torch.zeros(2, 1)
    said["odd state"] = message_of(lambda: run.save(root / "odd", {}))

    if rank == 1:
        (root / "full" / "state" / "state-00001.safetensors").mkdir(parents=True)
    run = Run("fsdp1:SHARD_GRAD_OP", "adamw")
    said["unwritable"] = message_of(lambda: run.save(root / "full", {}))

    for engine in ("fsdp1", "fsdp2"):
        said.update(gathered(engine, root))
    return said


def random_numbers(rank, root, saves):
    """Saves and draws, or draws other numbers, loads and draws; and what was logged."""
    run = Run("ddp" if dist.is_initialized() else "single", "adamw")
    torch.manual_seed(100 * saves + rank)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("opendm.trainer.train_state")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if saves:
        run.save(root, {})
    else:
        run.load(root)
    logger.removeHandler(handler)
    return torch.rand(4).tolist(), lines
