"""Rules about the source that no linter checks, and the public import paths."""

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "opendm"

PUBLIC = {
    "opendm.constants.precision": ["BF16_MIXED_PRECISION_POLICY", "FP32_MIXED_PRECISION_POLICY"],
    "opendm.constants.robot": ["ActionMode", "RobotStateDesc", "RobotType", "ROBOT_STATE_DESCS"],
    "opendm.data.dataset": ["JsonlDataset"],
    "opendm.data.transforms": [
        "ActionAbsolute", "ActionRelative", "ArrangeState", "BuildAction", "BuildActionChunk",
        "ChatTokenization", "Denormalize", "LoadHistory", "LoadImages", "Normalize", "PadAction",
        "Pipeline", "PixelTransform", "ToDevice",
    ],
    "opendm.data.augmentations": [
        "NoAugmentationPipeline", "PadToSquare", "TrainingTransformPipeline", "TransformPipeline",
    ],
    "opendm.data.collator": ["NormStatsCollator", "TrainingCollator"],
    "opendm.data.normalize": ["NormStats", "NormStatsFile", "RunningStats"],
    "opendm.dataset.register": ["CONVERSATION_DATA", "register_dataset"],
    "opendm.exp.dm05_exp": [
        "DM05DataConfig", "DM05Exp", "DM05InferenceConfig", "DM05LoraConfig", "DM05ModelConfig",
        "DM05OptimizerConfig", "DM05TrainerConfig",
    ],
    "opendm.model.dm05.dm05_arch": [
        "DM05ActionExpert", "DM05Config", "DM05ForConditionalGeneration", "DM05Model",
    ],
    "opendm.model.dm05.dm05_utils": [
        "linear_fp32", "make_suffix_attn_mask", "masked_flow_matching_loss", "posemb_sincos",
        "validate_action_config_compatible",
    ],
    "opendm.trainer.trainer": ["DMTrainer", "safe_save_model_for_hf_trainer"],
}  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_can_be_imported(module):
    imported = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if name not in vars(imported)] == []


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, len(node.args), node.lineno


def test_nothing_probes_for_attributes():
    probes = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for name, count, line in calls(ast.parse(path.read_text()))
        if name == "hasattr" or (name == "getattr" and count > 2)
    ]
    assert probes == []


def test_no_file_is_longer_than_one_idea():
    long = {
        p.name: n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400
    }
    assert long == {}
