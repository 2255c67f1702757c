"""The moving average: its formula, its exchange with the weights, its pieces."""

import pytest
import torch

from opendm.errors import EngineError
from opendm.trainer.ema import Ema


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def test_it_is_the_weighted_sum_of_all_weights_so_far(model):
    decay = 0.9
    ema = Ema(dict(model.named_parameters()), decay)
    history = [model[0].weight.detach().double()]
    for _ in range(7):
        with torch.no_grad():
            model[0].weight += torch.randn(4, 3)
        history.append(model[0].weight.detach().double())
        ema.update()
    last = len(history) - 1
    wanted = decay**last * history[0] + (1 - decay) * sum(
        decay ** (last - step) * weight for step, weight in enumerate(history) if step
    )
    torch.testing.assert_close(ema.tensors["0.weight"].double(), wanted, rtol=1e-6, atol=1e-6)


def test_weights_that_stay_are_their_own_average(model):
    ema = Ema(dict(model.named_parameters()), 0.99)
    for _ in range(50):
        ema.update()
    for name, parameter in model.named_parameters():
        assert torch.equal(ema.tensors[name], parameter)


def test_it_does_not_follow_the_weights_before_an_update(model):
    ema = Ema(dict(model.named_parameters()), 0.5)
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1
    assert torch.equal(ema.tensors["0.weight"], before)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_come_back_bit_for_bit_also_after_an_error(model, fails):
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([float("nan"), -0.0, 1e-45])
    ema = Ema(dict(model.named_parameters()), 0.5)
    with torch.no_grad():
        model[0].weight += 1
        model[0].weight[0] = torch.tensor([float("inf"), -0.0, 3e-45])
    weight, average = (tensor.view(torch.int32).clone() for tensor in ema_pair(model, ema))
    with pytest.raises(RuntimeError, match="bad sample") if fails else nothing(), ema.swapped():
        inside = [tensor.view(torch.int32).clone() for tensor in ema_pair(model, ema)]
        if fails:
            raise RuntimeError("bad sample")
    after = [tensor.view(torch.int32) for tensor in ema_pair(model, ema)]
    assert torch.equal(inside[0], average)
    assert torch.equal(after[0], weight)
    assert torch.equal(after[1], average)


def ema_pair(model, ema):
    return model[0].weight.detach(), ema.tensors["0.weight"]


def nothing():
    return torch.no_grad()


def test_an_average_of_another_shape_is_refused(model):
    ema = Ema({"weight": model[0].weight}, 0.5)
    model[0].weight.data = torch.zeros(1, 3)
    with pytest.raises(EngineError, match=r"average of weight has shape \(4, 3\)"):
        ema.update()
