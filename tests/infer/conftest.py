"""One policy for all tests of the policy and the service."""

import pytest
import torch
from service_kit import InProcess, make_service

from opendm.infer.policy import Policy


@pytest.fixture(scope="session")
def served_policy(served_checkpoint):
    torch.set_num_threads(1)
    return Policy.from_checkpoint(served_checkpoint)


@pytest.fixture(scope="session")
def service(served_policy, served_checkpoint):
    """Batching off: replies are those of a quiet service, bit for bit."""
    service = make_service(served_policy, served_checkpoint, max_batch_size=1)
    yield service
    service.worker.close()
    service.pool.shutdown()


@pytest.fixture(scope="session")
def app(service):
    return InProcess(service)


@pytest.fixture
def start_service():
    """Makes services that end with the test, whatever becomes of it."""
    started = []

    def start(*words, **flags):
        started.append(make_service(*words, **flags))
        return started[-1]

    yield start
    for service in started:
        service.worker.close()
        service.pool.shutdown()
