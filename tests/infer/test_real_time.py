"""Chunks that go on from given actions, graphs over the suffix, and a loop that never waits."""

import time
from functools import partial

import numpy as np
import pytest
import torch
from policies import CHUNK, Q01, Q99, make_layout
from service_kit import STATE, picture
from torch.utils._python_dispatch import TorchDispatchMode

from opendm.errors import ConfigError, DataError
from opendm.infer.chunk_runner import ActionChunkRunner
from opendm.infer.cuda_graphs import (
    SuffixGraphs,
    pad_prefix,
    record_cuda_graph,
    run_prefix,
    use_cuda_graphs,
)
from opendm.infer.euler import integrate
from opendm.infer.policy import MODEL_INPUTS, Observation, Policy, PolicyOptions
from opendm.infer.real_time import act_from, normalised_actions

TICK_S = 0.02


@pytest.fixture
def seen():
    return Observation(STATE, {"images_1": picture(0), "images_2": picture(1)}, "Reach")


def inputs_of(policy, observation):
    batch = policy._collate([policy.prepare(observation).inputs])
    return {key: batch[key] for key in MODEL_INPUTS if batch.get(key) is not None}


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


# Given actions


def test_the_loop_without_given_actions_is_the_models_own(served_policy, seen):
    inputs, noise = inputs_of(served_policy, seen), served_policy.noise_for([0])
    mask = served_policy.action_mask([served_policy.prepare(seen)])
    with torch.no_grad():
        ours = integrate(
            served_policy.model, run_prefix(served_policy.model, inputs), noise, mask, num_steps=4
        )
    own = served_policy._sample_actions(inputs, noise, mask, 4)
    assert torch.equal(ours, own)


def test_given_actions_stand_in_the_chunk_and_none_is_the_plain_policy(served_policy, seen):
    plain = served_policy.act(seen, num_steps=3, generator=generator())
    none = act_from(served_policy, seen, np.zeros((0, 4)), num_steps=3, generator=generator())
    np.testing.assert_array_equal(none, plain)
    given = plain[:2] + np.float32(0.05)
    chunk = act_from(served_policy, seen, given, num_steps=3, generator=generator())
    np.testing.assert_array_equal(chunk[:2], given)
    assert not np.allclose(chunk[2:], plain[2:], atol=1e-4), "the rest does not know of them"


def test_given_actions_lie_on_the_line_from_their_noise_at_every_step(
    served_policy, seen, monkeypatch
):
    """What the velocity field is shown, step by step: t * noise + (1 - t) * given."""
    network = served_policy.model.model
    shown, usual = [], type(network).velocity

    def velocity(self, x_t, time, prefix):
        shown.append((float(time[0]), x_t.clone()))
        return usual(self, x_t, time, prefix)

    monkeypatch.setattr(type(network), "velocity", velocity)
    given = np.tile(np.float32([0.2, 0.5, 0.1, 0.5]), (2, 1))
    act_from(served_policy, seen, given, num_steps=4, generator=generator())
    noise = served_policy.draw_noise([generator()])
    # relative dimensions minus the state, then [q01, q99] to [-1, 1]
    relative = given - np.array([*STATE[:3], 0])
    target = torch.tensor((relative - Q01) / (Q99 - Q01 + 1e-6) * 2 - 1)
    assert [time for time, _ in shown] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    for time_now, x_t in shown:
        line = time_now * noise[0, :2, :4] + (1 - time_now) * target
        torch.testing.assert_close(x_t[0, :2, :4].double(), line.double(), rtol=0, atol=1e-5)


def test_actions_survive_the_way_to_the_model_and_back(served_policy, seen):
    prepared = served_policy.prepare(seen)
    actions = np.random.default_rng(0).normal(size=(CHUNK, 4)).astype(np.float32)
    normalised = normalised_actions(served_policy, prepared, actions)
    assert normalised.shape == (1, CHUNK, 32)
    back = served_policy._robot_units(normalised[0].numpy(), prepared)
    np.testing.assert_allclose(back, actions, atol=1e-6)


@pytest.mark.parametrize(
    "given", [np.zeros((2, 3)), np.zeros(4), np.zeros((CHUNK, 4)), np.full((1, 4), np.nan)]
)
def test_given_actions_that_do_not_fit_are_refused(served_policy, seen, given):
    with pytest.raises(DataError, match="given actions"):
        act_from(served_policy, seen, given)


@pytest.mark.parametrize("given", [np.zeros((0, 4)), np.zeros((2, 4))])
def test_given_actions_are_refused_where_rotations_are_composed(served_policy, seen, given):
    """The way to the model subtracts rotation vectors; the way back composes them."""
    parts = served_policy.model, served_policy.processor
    options = PolicyOptions(compose_eef_rot=True)
    composing = Policy(*parts, served_policy.layout, served_policy.norm_stats, options)
    with pytest.raises(ConfigError, match="compose_eef_rot"):
        act_from(composing, seen, given)
    absolute = make_layout(action_mode="absolute")
    unaffected = Policy(*parts, absolute, served_policy.norm_stats, options)
    chunk = act_from(unaffected, seen, given, num_steps=1)
    np.testing.assert_array_equal(chunk[: len(given)], given)


# CUDA graphs


def run_again(work):
    """A recorder for machines without graphs: replaying is doing the work again."""
    result = work()
    return result, lambda: result.copy_(work())


def test_padding_to_a_captured_length_and_replaying_changes_nothing(served_policy, seen):
    """The bookkeeping around graphs, with a recorder that needs none."""
    model = served_policy.model
    sampler = SuffixGraphs(model, 3, (64, 96, 256), run_again)
    mask = served_policy.action_mask([served_policy.prepare(seen)])
    others = Observation(STATE, {"images_1": picture(4), "images_2": picture(5)}, "Reach " * 4)
    for observation, seed in ((seen, 0), (others, 1), (seen, 2)):
        inputs, noise = inputs_of(served_policy, observation), served_policy.noise_for([seed])
        with torch.no_grad():
            ours = sampler(inputs, noise, mask, 3)
        own = served_policy._sample_actions(inputs, noise, mask, 3)
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
    assert 1 <= len(sampler._captured) <= 3
    with torch.no_grad():
        prefix = run_prefix(model, inputs_of(served_policy, seen))
    assert not pad_prefix(prefix, 300).visible[:, prefix.visible.shape[1] :].any()


def test_lengths_of_graphs_must_rise(served_policy):
    with pytest.raises(ConfigError, match="prefix-seq-len-buckets"):
        use_cuda_graphs(served_policy, 3, [256, 128])


class WeightCasts(TorchDispatchMode):
    """Counts casts of weights."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_cast = func is torch.ops.aten._to_copy.default
        self.count += is_cast and isinstance(args[0], torch.nn.Parameter)
        return func(*args, **(kwargs or {}))


def test_what_is_recorded_reads_no_weight_that_was_cast_before(served_policy, seen, monkeypatch):
    """Autocast frees its cached casts when sampling ends; a graph would read on in freed memory."""
    counts = []

    def record(work):
        for _ in range(2):  # to warm up, and to capture
            with WeightCasts() as casts:
                result = work()
            counts.append(casts.count)
        return result, lambda: None

    monkeypatch.setattr(served_policy.model, "precision_policy", "fp32_mixed")
    monkeypatch.setattr(
        served_policy, "sampler", SuffixGraphs(served_policy.model, 3, (256,), record)
    )
    served_policy.act(seen, num_steps=3)
    assert counts[0] == counts[1] > 0


RECORDERS = [
    pytest.param("cpu", run_again, id="cpu"),
    pytest.param(
        "cuda",
        record_cuda_graph,
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize(("device", "record"), RECORDERS)
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16_mixed", 1e-4), ("fp32_mixed", 2e-2)])
def test_a_policy_acts_through_graphs_as_it_does_without(
    served_policy, seen, monkeypatch, device, record, precision, tolerance
):
    """Calls of their own, as a service makes them: whatever one leaves behind, the next one finds.

    Padding changes the order of sums, which fp32_mixed rounds to bfloat16.
    """
    model = served_policy.model.to(device)
    monkeypatch.setattr(model, "precision_policy", precision)
    try:
        noises = [served_policy.noise_for([seed]) for seed in range(3)]
        plain = [served_policy.act(seen, num_steps=3, noise=noise) for noise in noises]
        sampler = SuffixGraphs(model, 3, (256,), record)
        monkeypatch.setattr(served_policy, "sampler", sampler)
        ours = [served_policy.act(seen, num_steps=3, noise=noise) for noise in noises]
    finally:
        model.to("cpu")
    np.testing.assert_allclose(ours, plain, rtol=0, atol=tolerance)
    assert np.abs(np.subtract(plain[0], plain[1])).max() > 2 * tolerance
    assert len(sampler._captured) == 1


# The runner


def counting_policy(observation, given, *, delay_s=0.0, horizon=30):
    """Row i of a chunk is the tick that it belongs to; ``observation`` is the present tick."""
    time.sleep(delay_s)
    return np.arange(observation, observation + horizon, dtype=np.float32)[:, None]


def drive(runner, num_ticks):
    """A 50 Hz loop: what every tick did, and the longest wait but one.

    The longest is left out: on a busy machine the system may take the processor away.
    """
    steps, waits = [], []
    start = time.perf_counter()
    for tick in range(num_ticks):
        before = time.perf_counter()
        steps.append(runner.tick(tick))
        waits.append(time.perf_counter() - before)
        time.sleep(max(0.0, start + (tick + 1) * TICK_S - time.perf_counter()))
    return steps, sorted(waits)[-2]


def test_a_policy_of_200_ms_never_makes_a_50_hz_loop_wait():
    runner = ActionChunkRunner(partial(counting_policy, delay_s=0.2), num_given=12)
    steps, longest = drive(runner, 75)
    runner.close()
    assert longest < TICK_S
    first = next(i for i, step in enumerate(steps) if step.action is not None)
    assert first * TICK_S >= 0.15, "the policy is slow"
    assert not any(step.is_held for step in steps)
    for tick, step in enumerate(steps[first:], start=first):
        assert step.action.tolist() == [tick], "rows that passed are skipped"


def test_the_new_chunk_is_asked_to_begin_with_what_is_being_executed():
    asked = []

    def policy(observation, given):
        asked.append((observation, given))
        return counting_policy(observation, given, delay_s=0.03)

    runner = ActionChunkRunner(policy, num_given=3, replan_every=5)
    drive(runner, 20)
    runner.close()
    assert asked[0][1].size == 0
    assert len(asked) >= 3
    for tick, given in asked[1:]:
        assert given[:, 0].tolist() == [tick, tick + 1, tick + 2]


def test_a_policy_that_fails_leaves_the_robot_its_plan_then_its_last_action():
    calls = []

    def policy(observation, given):
        calls.append(observation)
        if 1 < len(calls) < 5:
            raise RuntimeError("no network")
        return counting_policy(observation, given, horizon=4)

    runner = ActionChunkRunner(policy, replan_every=4)
    steps, longest = drive(runner, 14)
    assert runner.error is not None
    assert longest < TICK_S
    held = [step for step in steps if step.is_held]
    assert held
    assert all(step.action.tolist() == [3] for step in held)
    drive(runner, 12)
    assert runner.error is None, "it recovers with the policy"
    runner.close()


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((0, 1)),
        np.zeros((4, 0)),
        np.zeros(4),
        np.zeros((1, 4, 1)),
        np.zeros((4, 2)),
        np.array([[0.0], [np.nan]]),
        np.array([[np.inf]]),
        "no chunk",
    ],
)
def test_a_chunk_that_is_none_is_a_failed_policy_and_never_reaches_the_robot(wrong):
    """Here the second one, whose first row would be due at once."""
    calls = []

    def policy(observation, given):
        calls.append(observation)
        return wrong if len(calls) == 2 else counting_policy(observation, given)

    runner = ActionChunkRunner(policy, replan_every=4)
    steps, errors = [], []
    for tick in range(8):
        steps.append(runner.tick(tick))
        wait_until(lambda: runner._order is None)
        errors.append(runner.error)
    runner.close()
    assert [step.action.tolist() for step in steps[1:]] == [[tick] for tick in range(1, 8)]
    assert errors[3] is None
    assert isinstance(errors[4], (DataError, ValueError))


def test_a_first_chunk_that_is_none_is_no_chunk():
    runner = ActionChunkRunner(lambda *_: np.full((3, 4), np.nan), replan_every=100)
    runner.tick(0)
    wait_until(lambda: runner.error is not None)
    assert runner.tick(1).action is None
    runner.close()


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
