"""Several noise draws per observation train the same under every engine."""

import noise_work
import numpy as np
from ranks import fork_ranks
from workers import Case

CASES = [Case("ddp"), Case("fsdp1", preset="per_layer", checkpointing=True), Case("fsdp2")]


def test_engines_agree_on_the_mean_over_draws(tmp_path):
    expected = noise_work.two_losses(Case("single"))
    assert expected[0] != expected[1]
    for rank in fork_ranks(noise_work.all_cases, 2, CASES, tmp_path=tmp_path):
        np.testing.assert_allclose(rank, [expected] * len(CASES), rtol=2e-5)
