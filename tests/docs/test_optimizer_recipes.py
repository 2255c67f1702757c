"""Every example on the optimizer's page runs and does what the page says."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fork_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

REPOSITORY = Path(__file__).parents[2]
RECIPE = re.compile(r"^<!-- recipe: (\w+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUM_MATRICES = 4
NUM_BATCHES = 3


def page(language):
    return (REPOSITORY / f"docs/{language}/optimizer.md").read_text(encoding="utf-8")


RECIPES = dict(RECIPE.findall(page("en")))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Four hidden matrices, an embedding and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 12)
        self.layers = nn.Sequential(Block(), Block())
        self.lm_head = nn.Linear(12, 7)

    def forward(self, inputs, labels=None):
        logits = self.lm_head(self.layers(self.embedding(inputs)))
        return logits if labels is None else {"loss": cross_entropy(logits, labels)}


def batches(part=slice(None)):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(7, (8, 2), generator=generator)[part] for _ in range(NUM_BATCHES)]
    return [tuple(row.unbind(1)) for row in rows]


def givens():
    return {
        "model": Network(),
        "Block": Block,
        "device": torch.device("cpu"),
        "batches": batches(),
        "loss_function": cross_entropy,
        "dataset": [
            {"inputs": x, "labels": y} for pair in batches() for x, y in zip(*pair, strict=True)
        ],
    }


def follow(recipe, names):
    """Execute a block; a class or function of it sees the other names."""
    exec(compile(RECIPES[recipe], recipe, "exec"), names)


def train(names, part=slice(None)):
    for inputs, targets in batches(part):
        cross_entropy(names["model"](inputs), targets).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, dist.tensor.DTensor) else tensor


def whole_weights(model):
    """By name, in the order of the model."""
    is_flat = any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
    summoned = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with summoned if is_flat else contextlib.nullcontext():
        return [whole(p.detach()).clone().numpy() for p in model.parameters()]


def by_name(optimizer, key):
    return {
        name: whole(optimizer.state[param][key])
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def muon_names(optimizer):
    return sorted(name for plan in optimizer.plans for name in plan.names)


def distributed(rank, recipe):
    """Weights after training by the recipe, and how many matrices this rank orthogonalised."""
    names = givens()
    follow(recipe, names)
    if recipe == "group":
        names["model"] = DistributedDataParallel(names["model"])
    train(names, slice(rank, None, 2))
    return whole_weights(names["model"]), names["optimizer"].num_orthogonalized


HIDDEN = sorted(f"layers.{i}.{part}.weight" for i in (0, 1) for part in ("up", "down"))


def test_both_languages_have_the_same_examples_and_all_of_them_are_tested():
    blocks = re.compile(r"(?:^<!--[^\n]*\n)?^```.*?^```$", re.MULTILINE | re.DOTALL)
    english, chinese = (blocks.findall(page(language)) for language in ("en", "zh"))
    assert english == chinese
    assert len(english) == len(RECIPES)
    source = Path(__file__).read_text()
    assert [name for name in RECIPES if f'"{name}"' not in source] == []


@pytest.mark.parametrize("recipe", ["plain", "trainer"])
def test_a_recipe_for_one_process_trains_every_parameter(recipe, tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", num_train_epochs=1
    )
    names = {**givens(), "arguments": arguments}
    follow(recipe, names)
    assert muon_names(names["optimizer"]) == HIDDEN
    assert names["optimizer"].num_orthogonalized == NUM_MATRICES * NUM_BATCHES
    for (name, now), before in zip(
        names["model"].named_parameters(), Network().parameters(), strict=True
    ):
        assert not torch.equal(now, before), name


@pytest.mark.parametrize("recipe", ["fsdp1", "fsdp2", "ddp", "group"])
def test_a_recipe_for_two_ranks_trains_as_one_process_and_shares_the_work(recipe, tmp_path):
    reference = givens()
    follow("group", reference)
    train(reference)
    expected = whole_weights(reference["model"])
    (first, work_0), (second, work_1) = fork_ranks(distributed, recipe, tmp_path=tmp_path)
    for wanted, a, b, start in zip(expected, first, second, Network().parameters(), strict=True):
        assert (a == b).all()
        assert abs(a - start.detach().numpy()).max() > 5e-4
        torch.testing.assert_close(torch.tensor(a), torch.tensor(wanted), rtol=0, atol=2e-5)
    assert work_0 + work_1 == NUM_MATRICES * NUM_BATCHES
    assert min(work_0, work_1) > 0


def test_predicate_marks_and_groups_choose_what_the_page_says(capsys):
    for recipe, wanted in (("predicate", HIDDEN), ("marks", HIDDEN), ("groups", HIDDEN)):
        names = givens()
        follow(recipe, names)
        assert muon_names(names["optimizer"]) == wanted
    muon = {group["use_muon"]: group for group in names["optimizer"].param_groups}
    assert (muon[True]["lr"], muon[True]["weight_decay"]) == (1e-3, 0.1)
    assert (muon[False]["lr"], muon[False]["weight_decay"]) == (3e-4, 0.0)
    assert sorted(eval(capsys.readouterr().out)) == HIDDEN


def save_under_fsdp2(rank, folder):
    """Moments before and after a round trip through DCP, and what the counters print."""
    names = givens()
    follow("fsdp2", names)
    train(names, slice(rank, None, 2))
    printed = (Path(folder) / f"counters{rank}.txt").open("w")
    with printed, contextlib.redirect_stdout(printed), contextlib.chdir(folder):
        follow("counters", names)
        follow("save", names)
        follow("dcp_save", names)
        before = by_name(names["optimizer"], "exp_avg")
        for state in names["optimizer"].state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        follow("dcp_load", names)
    after = by_name(names["optimizer"], "exp_avg")
    return {name: (before[name].numpy(), after[name].numpy()) for name in before}


def test_states_and_counters_do_what_the_page_says(tmp_path, monkeypatch):
    moments, _ = fork_ranks(save_under_fsdp2, str(tmp_path), tmp_path=tmp_path)
    monkeypatch.chdir(tmp_path)
    names = givens()
    follow("group", names)
    follow("load", names)
    loaded = by_name(names["optimizer"], "exp_avg")
    assert loaded.keys() == moments.keys()
    for name, (before, after) in moments.items():
        assert (before == after).all(), f"{name} through torch's distributed checkpoint"
        assert (loaded[name].numpy() == before).all(), f"{name} through save_optimizer_state"
        assert abs(before).max() > 0
    printed = [(tmp_path / f"counters{rank}.txt").read_text().splitlines() for rank in (0, 1)]
    assert printed[0][:3] == printed[1][:3]
    assert all(re.match(r"rank \d: 1\.00 of the mean work, \d+ B out", line)
               for line in printed[0][1:3])  # fmt: skip
    assert sum(int(lines[3]) for lines in printed) == NUM_MATRICES * NUM_BATCHES
    assert printed[0][4] == "0"


def test_the_language_model_example_runs_and_draws_both_curves(tmp_path):
    plot = tmp_path / "plot.svg"
    command = [sys.executable, REPOSITORY / "examples/muon_language_model.py", "--quick"]
    result = subprocess.run(
        [*command, "--plot", plot], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^chosen: AdamW \S+, MuonAdamW \S+$", result.stdout, re.MULTILINE)
    drawn = plot.read_text()
    assert all(f"<title>{name}</title>" in drawn for name in ("AdamW", "MuonAdamW"))
