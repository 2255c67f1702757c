"""When the worker waits for more requests, and what its batches are then."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from policies import make_layout

from opendm.infer.limits import RequestError
from opendm.infer.observation import Observation
from opendm.infer.policy import Policy, Prepared
from opendm.infer.request import Request
from opendm.infer.worker import PolicyWorker

LONG_S = 5.0


class SlowPolicy(Policy):
    """Acts when ``gate`` opens; its actions are the state."""

    def __init__(self):
        self.sizes = []
        self.gate = threading.Event()
        self.gate.set()

    def prepare(self, observation):
        return Prepared({}, np.array(observation.state), {}, make_layout())

    def draw_noise(self, generators):
        return [None] * len(generators)

    def act_prepared(self, prepared, **_):
        self.sizes.append(len(prepared))
        assert self.gate.wait(10)
        return [one.state[None] for one in prepared]


@pytest.fixture
def start():
    workers = []

    def run(policy, window_s=LONG_S):
        worker = PolicyWorker(policy, num_steps=1, max_queue=16, max_batch=8, window_s=window_s)
        worker.start()
        workers.append(worker)
        return worker

    yield run
    for worker in workers:
        worker.close()


def ask(worker, value):
    answer = Future()
    worker.submit(Request(Observation([float(value)], {}, ""), 0), answer)
    return answer


def until(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_lone_client_never_waits_for_company(start):
    worker = start(SlowPolicy())
    begin = time.monotonic()
    for value in range(20):
        assert ask(worker, value).result(LONG_S).actions.item() == value
    assert time.monotonic() - begin < LONG_S / 2
    assert worker.batch_sizes == {1: 20}


@pytest.mark.parametrize("num_clients", [2, 5])
def test_clients_that_ask_at_once_come_to_share_their_batches_without_the_whole_wait(
    start, num_clients
):
    """They start apart, one of them while the others wait, and end up together."""
    policy = SlowPolicy()
    worker = start(policy)
    rounds = 8
    policy.gate.clear()

    def client(value):
        for _ in range(rounds + (value == 0)):
            assert ask(worker, value).result(10).actions.item() == value

    threads = [threading.Thread(target=client, args=(value,)) for value in range(num_clients)]
    threads[0].start()
    until(lambda: policy.sizes)
    for thread in threads[1:]:
        thread.start()
    until(lambda: worker._queue.qsize() == num_clients - 1)
    begin = time.monotonic()
    policy.gate.set()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < LONG_S / 2, "a full batch need not wait for the window"
    assert policy.sizes == [1] + [num_clients] * rounds


def test_the_wait_ends_with_the_window_when_a_client_is_gone(start):
    policy = SlowPolicy()
    worker = start(policy, window_s=0.2)
    policy.gate.clear()
    first = ask(worker, 0)
    until(lambda: policy.sizes)
    others = [ask(worker, 1), ask(worker, 2)]
    policy.gate.set()
    for answer in (first, *others):
        answer.result(5)
    waits = []
    for _ in range(2):
        begin = time.monotonic()
        ask(worker, 3).result(5)
        waits.append(time.monotonic() - begin)
    assert waits[0] >= 0.2
    assert waits[1] < 0.2


def test_a_batch_waits_for_a_request_that_is_being_checked_but_not_for_ever(start):
    policy = SlowPolicy()
    worker = start(policy, window_s=0.1)
    with worker.expecting():
        first = ask(worker, 1)
        time.sleep(0.2)
        second = ask(worker, 2)
    assert [one.result(5).actions.item() for one in (first, second)] == [1, 2]
    assert policy.sizes == [2]
    worker._num_active = 1
    begin = time.monotonic()
    with worker.expecting():
        ask(worker, 3).result(5)
    assert 0.3 < time.monotonic() - begin < 2
    begin = time.monotonic()
    ask(worker, 4).result(5)
    assert time.monotonic() - begin < 0.1, "nobody is expected any more"


def test_a_request_that_is_refused_while_it_is_checked_never_reaches_the_model(service):
    wrong = RequestError("no")

    expected = []

    def parse():
        expected.append(service.worker._num_expected)
        raise wrong

    before = dict(service.worker.batch_sizes)
    answer, gone = Future(), Future()
    gone.cancel()
    for one in (answer, gone):
        service._check_and_queue(parse, one)
    assert answer.exception(1) is wrong
    assert gone.cancelled()
    assert expected == [1, 1], "the worker knows of it meanwhile"
    assert service.worker._num_expected == 0
    assert service.worker.batch_sizes == before
