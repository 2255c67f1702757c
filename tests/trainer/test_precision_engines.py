"""The matrix of precision: each dtype of a training step, by policy, engine and adaptation.

With low-rank adapters (``lora``) the base is frozen, and every engine keeps it as it was loaded.
About 25 s.
"""

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import precision_work
from ranks import fork_ranks

POLICIES = ("bf16_mixed", "fp32_mixed")
SHARDED = ("ddp", "fsdp1", "fsdp2")
NUM_LAYERS = 2
FLOAT32, BFLOAT16 = ["float32"], ["bfloat16"]

ALWAYS = {
    "stored": FLOAT32,  # every engine keeps float32 master weights
    "stored_after": FLOAT32,
    "gradients": FLOAT32,
    "states": FLOAT32,
    "buffers": FLOAT32,
    "outputs": FLOAT32,
}
BY_POLICY = {
    "bf16_mixed": {"condition": BFLOAT16, "residual": BFLOAT16, "angles": BFLOAT16},
    "fp32_mixed": {"condition": FLOAT32, "residual": FLOAT32, "angles": FLOAT32},
}
BY_ENGINE = {
    ("single", "bf16_mixed"): {"read": FLOAT32, "gathered": [], "reduced": []},
    ("ddp", "bf16_mixed"): {"read": FLOAT32, "gathered": [], "reduced": FLOAT32},
    ("fsdp1", "bf16_mixed"): {"read": BFLOAT16, "gathered": BFLOAT16, "reduced": FLOAT32},
    ("fsdp2", "bf16_mixed"): {"read": BFLOAT16, "gathered": BFLOAT16, "reduced": FLOAT32},
    ("single", "fp32_mixed"): {"read": FLOAT32, "gathered": [], "reduced": []},
    ("ddp", "fp32_mixed"): {"read": FLOAT32, "gathered": [], "reduced": FLOAT32},
    ("fsdp1", "fp32_mixed"): {"read": FLOAT32, "gathered": FLOAT32, "reduced": FLOAT32},
    ("fsdp2", "fp32_mixed"): {"read": FLOAT32, "gathered": FLOAT32, "reduced": FLOAT32},
}
PROJECTIONS, TIME_LAYERS, MODULATORS = 2, 2, 2 * NUM_LAYERS + 1


@pytest.fixture(scope="module")
def seen():
    """By engine, policy and adaptation, what each rank saw."""
    kinds = [(policy, lora) for policy in POLICIES for lora in (False, True)]
    found = {("single", *kind): [precision_work.step(0, 1, "single", *kind)] for kind in kinds}
    cases = [(engine, *kind) for engine in SHARDED for kind in kinds]
    with tempfile.TemporaryDirectory() as folder:
        by_rank = fork_ranks(precision_work.steps, 2, cases, tmp_path=Path(folder))
    return found | dict(zip(cases, zip(*by_rank, strict=True), strict=True))


CASES = pytest.mark.parametrize(("engine", "policy"), BY_ENGINE)
LORA = pytest.mark.parametrize("lora", [False, True])


@CASES
@LORA
def test_storage_computation_communication_and_states_have_the_policys_dtypes(
    engine, policy, lora, seen
):
    expected = ALWAYS | BY_POLICY[policy] | BY_ENGINE[engine, policy]
    for rank in seen[engine, policy, lora]:
        assert {name: rank[name] for name in expected} == expected


@CASES
@LORA
def test_every_product_is_bfloat16_but_those_that_the_policy_names(engine, policy, lora, seen):
    in_float32 = PROJECTIONS + (TIME_LAYERS + MODULATORS if policy == "fp32_mixed" else 0)
    for rank in seen[engine, policy, lora]:
        assert rank["products"].keys() == {"float32", "bfloat16"}
        assert rank["products"]["float32"] == in_float32
        assert rank["products"] == seen["single", policy, lora][0]["products"]


@CASES
def test_frozen_weights_stay_as_loaded_except_under_fsdp1(engine, policy, seen):
    """FSDP1 wants one dtype within a unit; what it hands out is in the policy's dtype anyway."""
    as_loaded = BFLOAT16 if policy == "bf16_mixed" and engine != "fsdp1" else FLOAT32
    assert all(rank["stored_frozen"] == as_loaded for rank in seen[engine, policy, False])


@CASES
def test_the_base_of_an_adapter_stays_as_loaded_on_every_engine(engine, policy, seen):
    as_loaded = BFLOAT16 if policy == "bf16_mixed" else FLOAT32
    for rank in seen[engine, policy, True]:
        assert rank["stored_frozen"] == rank["read_frozen"] == as_loaded
        assert rank["stored_idle"] == FLOAT32


@CASES
@LORA
def test_images_keep_float32_sums_where_position_embeddings_are_read_in_float32(
    engine, policy, lora, seen
):
    """FSDP hands the vision tower a bfloat16 position embedding; a frozen one is bfloat16 too."""
    is_rounded = policy == "bf16_mixed" and (lora or engine in ("fsdp1", "fsdp2"))
    assert all(
        rank["vision"] == (BFLOAT16 if is_rounded else FLOAT32)
        for rank in seen[engine, policy, lora]
    )
