"""What each process does in the tests of averaging and validation."""

import torch
from workers import small_batch, small_model

from opendm.trainer.ema import Ema
from opendm.trainer.engine import Engine, clean_name, gather_weights
from opendm.trainer.validation import held_out, validation_loss

NUM_HELD_OUT = 5
SEED = 3
DECAY = 0.6


class Rows:
    """Samples whose transform draws from the global generators."""

    def __init__(self, num_samples=NUM_HELD_OUT):
        self.batch = small_batch(num_samples)
        self.batch["action_mask"][0, 2:] = False
        del self.batch["sample_seed"]

    def __len__(self):
        return len(self.batch["action"])

    def __getitem__(self, index):
        sample = {key: value[index] for key, value in self.batch.items()}
        return {**sample, "action": sample["action"] + 0.5 * torch.randn(4, 32)}


def stack(samples):
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def measure(model, engine, *, batch_size=2, num_samples=NUM_HELD_OUT, rank=0, world_size=1):
    samples = held_out(
        Rows(num_samples), stack, seed=SEED, batch_size=batch_size, rank=rank, world_size=world_size
    )
    return validation_loss(model, samples, engine)


def train(rank, name, world_size, *, evaluate):
    """Losses, weights and averages of two steps, evaluated after each or never."""
    engine = Engine(name, torch.device("cpu"), None)
    model = small_model().train()
    model = engine.wrap(model, model.fsdp_wrap_modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ema = Ema({clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}, DECAY)
    batch = {key: value[rank::world_size] for key, value in small_batch(4).items()}
    losses = []
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        if evaluate:
            with ema.swapped():
                averaged = measure(model, engine, rank=rank, world_size=world_size)
            losses.append((measure(model, engine, rank=rank, world_size=world_size), averaged))
    weights = as_arrays(gather_weights(model, keep=rank == 0))
    with ema.swapped():
        averages = as_arrays(gather_weights(model, keep=rank == 0))
    return {
        "losses": losses,
        "weights": weights,
        "averages": averages,
        "elements": sum(tensor.numel() for tensor in ema.tensors.values()),
    }


def as_arrays(weights):
    return {name: tensor.numpy().copy() for name, tensor in weights.items()}


def several_engines(rank, world_size, names):
    """Per engine: an evaluated run, one without, and the loss on fewer samples than ranks."""
    return {
        name: {
            "evaluated": train(rank, name, world_size, evaluate=True),
            "plain": train(rank, name, world_size, evaluate=False),
            "one_sample": one_sample(rank, name, world_size),
        }
        for name in names
    }


def one_sample(rank, name, world_size):
    """The loss on a single sample, which one rank alone has."""
    engine = Engine(name, torch.device("cpu"), None)
    model = small_model()
    model = engine.wrap(model, model.fsdp_wrap_modules())
    return measure(model, engine, num_samples=1, rank=rank, world_size=world_size)
