"""Which parameters Muon gets, from what may be given, and what is refused."""

import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    BertConfig,
    BertModel,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from opendm.errors import ConfigError
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.optimizer import (
    MuonAdamW,
    is_default_muon_parameter,
    is_hidden_matrix,
    mark_muon_parameters,
)


def released_model():
    text = {
        "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "sliding_window": 1024,
    }  # fmt: skip
    vision = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 448, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    vlm = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=256)
    action = Gemma3TextConfig(**{**text, "hidden_size": 1024, "intermediate_size": 4096})
    with torch.device("meta"):
        return DM05ForConditionalGeneration(DM05Config(vlm, action, use_lm_head=False))


@pytest.fixture(scope="module")
def released():
    return released_model()


def test_default_selects_the_238_matrices_of_the_released_expert(released):
    chosen = mark_muon_parameters(released)
    kinds = [f"self_attn.{k}_proj" for k in "qkvo"] + [
        f"mlp.{k}_proj" for k in ("gate", "up", "down")
    ]
    prefix = "model.action_expert.layers"
    expected = {f"{prefix}.{layer}.{kind}.weight" for layer in range(34) for kind in kinds}
    assert len(expected) == 238
    assert {name for name in chosen if name.startswith(prefix)} == set(chosen)
    assert set(chosen) == expected


def test_lora_factors_of_the_expert_are_left_to_adamw_unless_asked_for(released):
    config = LoraConfig(r=4, target_modules=r".*action_expert.*layers\.[01]\..*q_proj")
    with torch.device("meta"):
        model = get_peft_model(released, config)
    factors = [name for name, param in model.named_parameters() if param.requires_grad]
    assert len(factors) == 2 * 2
    assert all("model.action_expert.layers." in name and "lora_" in name for name in factors)
    with pytest.raises(ConfigError, match="no parameter is selected"):
        mark_muon_parameters(model)
    assert mark_muon_parameters(model, lambda _, p: p.requires_grad) == factors


class Expert(nn.Module):
    """Names as in the Action Expert, and one of each that is not selected."""

    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({
            "q_proj": nn.Linear(4, 6), "input_layernorm": nn.Linear(4, 4), "frozen": nn.Linear(4, 4)
        })  # fmt: skip
        layer["frozen"].requires_grad_(False)
        expert = nn.ModuleDict({
            "layers": nn.ModuleList([layer]), "embed_tokens": nn.Embedding(5, 4),
            "out": nn.Linear(4, 4),
        })  # fmt: skip
        self.model = nn.ModuleDict({
            "action_expert": expert,
            "language_model": nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])}),
        })  # fmt: skip


SELECTED = "model.action_expert.layers.0.q_proj.weight"


def wrapped_layer(model):
    layers = model.model["action_expert"]["layers"]
    layers[0] = checkpoint_wrapper(layers[0])
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data_parallel": nn.DataParallel,
    "twice": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
    "checkpointed": wrapped_layer,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_neither_the_choice_nor_the_names(wrapper):
    model = WRAPPERS[wrapper](Expert())
    optimizer = MuonAdamW(model)
    adamw, muon = optimizer.param_groups
    assert muon["param_names"] == [SELECTED]
    assert adamw["param_names"] == [n for n, p in Expert().named_parameters() if p.requires_grad
                                    and n != SELECTED]  # fmt: skip
    assert mark_muon_parameters(model) == [SELECTED]


@pytest.mark.parametrize(
    "prefix",
    ["", "model.", "base_model.model.model.", "module.model.", "_fsdp_wrapped_module.model."],
)
def test_expert_is_found_below_prefixes(prefix):
    weight = nn.Parameter(torch.zeros(2, 2))
    assert is_default_muon_parameter(f"{prefix}action_expert.layers.0.mlp.up_proj.weight", weight)
    assert not is_default_muon_parameter(f"{prefix}language_model.layers.0.up_proj.weight", weight)
    assert not is_default_muon_parameter(f"{prefix}inaction_expert.layers.0.up.weight", weight)


def test_hidden_matrices_of_llama_are_those_of_its_layers():
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                         num_attention_heads=2, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config)
    chosen = mark_muon_parameters(model, is_hidden_matrix)
    expected = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers." in n]
    assert [name.removesuffix(".weight") for name in chosen] == expected
    assert len(chosen) == 2 * 7


def test_hidden_matrices_of_gpt2_are_its_transposed_ones_too():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=6, n_embd=8, n_layer=2, n_head=2))
    kinds = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    expected = [f"transformer.h.{layer}.{kind}.weight" for layer in range(2) for kind in kinds]
    assert mark_muon_parameters(model, is_hidden_matrix) == expected


def test_hidden_matrices_of_bert_include_what_it_calls_output():
    config = BertConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
                        num_attention_heads=2)  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    expected = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert mark_muon_parameters(model, is_hidden_matrix) == expected
    assert len(expected) == 2 * 6


@pytest.mark.parametrize(
    "name", ["output.weight", "head.weight", "score_head.weight", "tok_embeddings.weight",
             "model.norm.weight", "wte.weight", "layers.0.q.lora_A.weight", "q_proj.bias"]
)  # fmt: skip
def test_edges_norms_and_adapters_are_no_hidden_matrices(name):
    assert not is_hidden_matrix(name, nn.Parameter(torch.zeros(3, 3)))


def test_marks_hold_name_and_shape_and_a_later_call_clears_them():
    model = Expert()
    assert mark_muon_parameters(model) == [SELECTED]
    marked = model.get_parameter(SELECTED)
    assert vars(marked) == {"_opendm_muon_shape": (6, 4), "_opendm_muon_name": SELECTED}
    other = "model.action_expert.out.weight"
    assert mark_muon_parameters(model, lambda name, _: name == other) == [other]
    assert vars(marked) == {}
    assert MuonAdamW(model).param_groups[1]["param_names"] == [other]


def test_a_predicate_has_precedence_over_marks():
    model = Expert()
    mark_muon_parameters(model)
    optimizer = MuonAdamW(model, predicate=lambda name, _: name.endswith("out.weight"))
    assert optimizer.param_groups[1]["param_names"] == ["model.action_expert.out.weight"]


def test_marking_nothing_or_no_matrix_is_refused():
    with pytest.raises(ConfigError, match=r"no parameter is selected .*predicate=is_hidden_matrix"):
        mark_muon_parameters(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"cannot take bias of shape \(3,\).*leave it out"):
        mark_muon_parameters(nn.Linear(3, 3), lambda *_: True)


# What may be given


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def first(name, param):
    return name == "0.weight"


def ready_groups(model):
    return [
        {"params": [(n, p) for n, p in model.named_parameters() if not first(n, p)],
         "use_muon": False},
        {"params": [("0.weight", model[0].weight)], "use_muon": True},
    ]  # fmt: skip


GIVEN = {
    "model": lambda model: (model, first),
    "list": lambda model: (list(model.named_parameters()), first),
    "generator": lambda model: (((n, p) for n, p in model.named_parameters()), first),
    "groups": lambda model: (ready_groups(model), None),
    "tied": lambda model: ([*model.named_parameters(), ("again", model[0].weight)], first),
}


@pytest.mark.parametrize("given", GIVEN)
def test_every_form_of_input_trains_alike(given):
    results = []
    for form in ("model", given):
        model = small()
        params, predicate = GIVEN[form](model)
        optimizer = MuonAdamW(params, lr=0.1, predicate=predicate)
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        results.append(torch.cat([param.flatten() for param in model.parameters()]))
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.cat([p.flatten() for p in small().parameters()]))


def test_groups_keep_their_own_options_and_may_have_no_names():
    model = small()
    groups = [
        {"params": [model[0].weight], "use_muon": True, "lr": 0.5, "muon_lr_scale": 2.0},
        {"params": model[1].weight, "use_muon": True},
        {"params": [model[0].bias, model[1].bias], "use_muon": False, "weight_decay": 0.25},
    ]
    optimizer = MuonAdamW(groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1, 0.1]
    assert [group["muon_lr_scale"] for group in optimizer.param_groups] == [2.0, 1.0, 1.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0, 0.25]
    before = [param.detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = [(b - p).norm().item() for b, p in zip(before, model.parameters(), strict=True)]
    # a gradient of ones is of rank one, so all updates have the same direction and spectral norm
    assert moved[0] / moved[2] == pytest.approx(10.0, rel=1e-4)
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert len(set(names)) == 4


def cube():
    return nn.ParameterDict({"cube": nn.Parameter(torch.zeros(2, 3, 4))})


REFUSED = {
    "parameters without names": (lambda m: m.parameters(), {}, "give the model"),
    "nothing": (lambda m: [], {}, "give a model or its named_parameters"),
    "use_muon missing": (lambda m: [{"params": [m[0].weight]}], {}, "say use_muon; give True"),
    "nothing selected": (lambda m: m, {"predicate": None}, "predicate=is_hidden_matrix"),
    "a vector": (lambda m: m, {"predicate": lambda *_: True}, "leave it out in the predicate"),
    "three axes": (lambda m: cube(), {"predicate": lambda *_: True}, "leave it out"),
    "an empty matrix": (
        lambda m: nn.ParameterDict({"w": nn.Parameter(torch.zeros(0, 3))}),
        {"predicate": lambda *_: True},
        "non-empty",
    ),
    "a name twice": (
        lambda m: [("a", m[0].weight), ("module.a", m[1].weight)],
        {"predicate": lambda *_: True},
        "two parameters are called a;.*must differ",
    ),
    "lr": (lambda m: m, {"lr": -1.0}, "lr=-1.0 is out of range; give a value 0 or more"),
    "lr nan": (lambda m: m, {"lr": float("nan")}, "lr=nan is out of range"),
    "betas": (lambda m: m, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) .* in \[0, 1\)"),
    "eps": (lambda m: m, {"eps": 0.0}, "eps=0.0 .* above 0"),
    "weight_decay": (lambda m: m, {"weight_decay": -0.1}, "weight_decay=-0.1 .* 0 or more"),
    "momentum": (lambda m: m, {"muon_momentum": 1.0}, "muon_momentum=1.0"),
    "steps": (lambda m: m, {"muon_ns_steps": 0}, "muon_ns_steps=0 .* 1 or more"),
    "scale": (lambda m: m, {"muon_lr_scale": -1.0}, "muon_lr_scale=-1.0"),
    "ns_dtype": (lambda m: m, {"ns_dtype": "fp8"}, "ns_dtype='fp8' .* fp32, tf32, fp16, bf16"),
    "missing_grad": (lambda m: m, {"missing_grad": "no"}, "missing_grad='no' .* skip, zero"),
    "option of a group": (
        lambda m: [{"params": [m[0].weight], "use_muon": True, "lr": -2.0}], {}, "lr=-2.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_to_do(case):
    given, options, message = REFUSED[case]
    construct = inspect.unwrap(MuonAdamW.__init__)  # without the type checks of the tests
    with pytest.raises(ConfigError, match=message):
        construct(object.__new__(MuonAdamW), given(small()), **{"predicate": first, **options})


def test_a_sparse_gradient_is_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3, sparse=True), "linear": nn.Linear(3, 3)})
    optimizer = MuonAdamW(model, predicate=lambda name, _: name == "linear.weight")
    model["embed"](torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer.step()
