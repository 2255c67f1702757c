"""The prompt: its text to the byte, its shortening, its history, its pixels."""

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, pre_tokenizers
from transformers import Gemma3Processor

from opendm.data.processor import check_reserved_ids, image_size, load_processor
from opendm.data.transforms import ChatTokenization, prompt_encoding
from opendm.data.transforms.prompt import build_messages, discretize_state, task_sentence
from opendm.data.transforms.prompt_encoding import encode_messages, encode_pictures
from opendm.errors import CheckpointError, ConfigError, DataError
from opendm.model.dm05.tiny import IMAGE_SIZE, build_processor
from opendm.pixels import scale_bytes


@pytest.fixture(scope="module")
def processor():
    return build_processor(["pick up the red cube", "open the drawer"])


def picture(shade=0):
    return Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (shade, 10, 20))


def noise(seed=0, size=(IMAGE_SIZE, IMAGE_SIZE)):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make(prompt="pick up the cube", views=2, **meta):
    return {
        "prompt": prompt,
        "state": np.array([-1.0, 0.0, 1.0], np.float32),
        "action": np.zeros((1, 5, 3), np.float32),
        "action_mask": np.ones((1, 5, 3), bool),
        "images": [picture(i) for i in range(views)],
        "meta_data": meta,
    }


def text_of(processor, ids):
    text = processor.tokenizer.decode(ids)
    return text.replace("<image_soft_token>", "").replace("<start_of_image><end_of_image>", "#")


def test_prompt_text_to_the_byte(processor):
    tokenize = ChatTokenization(processor, image_prompts=["Head", "Left"])
    meta = {"robot_type": "UR5", "control_mode": "EEF", "speed": "0.1"}
    out = tokenize(make(**meta))
    assert text_of(processor, out["input_ids"]) == (
        "<bos><start_of_turn>user\n"
        "Robot: UR5\nControl mode: end effector\nOverall speed: 0.1\nTask: pick up the cube.\n"
        "Head image:\n\n#\n\nLeft image:\n\n#\n\nStates: 0 127 255<end_of_turn>\n"
        "<start_of_turn>model\n"
    )


def test_message_items():
    one, two = picture(1), picture(2)
    (message,) = build_messages("go", [one, two], ["Head", "Left"], state_bins=[1, 2])
    assert message["role"] == "user"
    assert message["content"] == [
        {"type": "text", "text": "Overall speed: 0.5\nTask: go.\nHead image: "},
        {"type": "image", "image": one},
        {"type": "text", "text": "Left image: "},
        {"type": "image", "image": two},
        {"type": "text", "text": "States: 1 2"},
    ]


def test_history_placeholders_stand_after_the_task():
    (message,) = build_messages(
        "go", [picture()], ["Head"], num_history=2, max_history_images=3, control_mode="joint"
    )
    assert message["content"][0]["text"] == (
        "Control mode: joint\nOverall speed: 0.5\nTask: go.\nHistory images: "
        + "<unused1>" * 16
        + ("<unused0>" * 16 + "\n") * 2
        + "Head image: "
    )


@pytest.mark.parametrize("mark", [".", "!", "?", "。", "！", "？"])
def test_no_second_period(mark):
    assert task_sentence(f"go{mark}") == f"go{mark}"
    assert task_sentence("go") == "go."


def test_state_bins_are_computed_in_single_precision():
    values = np.linspace(-1.5, 1.5, 4001).astype(np.float32)
    one, two = np.float32(1), np.float32(2)
    expected = np.floor((np.clip(values, -1, 1) + one) / two * np.float32(255))
    assert discretize_state(values, 256) == expected.astype(int).tolist()
    assert discretize_state(values.astype(np.float64), 256) == expected.astype(int).tolist()
    with pytest.raises(DataError, match="not finite"):
        discretize_state(np.array([np.nan]), 256)


def test_outputs_and_the_sample_is_left_alone(processor):
    sample = make()
    before = set(sample)
    out = ChatTokenization(processor, image_prompts=["Head", "Left"])(sample)
    assert set(sample) == before
    assert out is not sample
    length = len(out["input_ids"])
    for key in ("input_ids", "attention_mask", "token_type_ids"):
        assert out[key].dtype == torch.int64
        assert out[key].shape == (length,)
    assert out["pixel_values"].shape == (2, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert out["action"].shape == out["action_mask"].shape == (1, 5, 3)
    assert out["history_pixel_values"] is None
    assert out["history_mask"] is None
    without = ChatTokenization(processor, add_state=False)({**sample, "action": None})
    assert without["action"] is None
    assert "States:" not in processor.tokenizer.decode(without["input_ids"])


def test_history_tensors(processor):
    tokenize = ChatTokenization(processor, is_history=True, max_history_images=3)
    out = tokenize({**make(), "history_images": [picture(1), picture(2)]})
    assert out["history_pixel_values"].shape == (2, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert out["history_mask"].sum() == 32
    assert (out["input_ids"] == 7).sum() == 16
    assert (out["token_type_ids"][out["history_mask"]] == 1).all()
    empty = tokenize(make())
    assert empty["history_pixel_values"] is None
    assert not empty["history_mask"].any()
    with pytest.raises(DataError, match="4 history images"):
        tokenize({**make(), "history_images": [picture()] * 4})


def test_a_long_task_is_shortened_and_nothing_else(processor):
    full = ChatTokenization(processor, image_prompts=["Head", "Left"])(make("open the drawer"))
    limit = len(full["input_ids"]) + 40
    tokenize = ChatTokenization(processor, max_length=limit, image_prompts=["Head", "Left"])
    out = tokenize(make("open the drawer and pick up the red cube " * 30))
    ids = out["input_ids"]
    assert len(full["input_ids"]) < len(ids) <= limit
    text = text_of(processor, ids)
    assert text.count("#") == 2
    assert "Task: open the drawer and" in text
    assert text.endswith("States: 0 127 255<end_of_turn>\n<start_of_turn>model\n")
    assert out["pixel_values"].shape[0] == 2


def test_a_prompt_that_cannot_fit_is_refused(processor):
    with pytest.raises(DataError, match="limit is 30"):
        ChatTokenization(processor, max_length=30)(make("open the drawer " * 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "prompt is None"),
        ({"prompt": "take <start_of_image> it"}, "reserved token"),
        ({"meta_data": {"speed": 0.5}}, "speed is 0.5"),
        ({"images": []}, "0 images for 2 image_prompts"),
    ],
)
def test_unusable_samples_are_refused(processor, change, message):
    with pytest.raises(DataError, match=message):
        ChatTokenization(processor, image_prompts=["Head", "Left"])({**make(), **change})


def test_processor_round_trip_and_refusals(processor, tmp_path):
    processor.save_pretrained(tmp_path / "good")
    loaded = load_processor(tmp_path / "good")
    assert image_size(loaded) == IMAGE_SIZE
    sample = make()
    ids = [ChatTokenization(p)(sample)["input_ids"] for p in (processor, loaded)]
    assert torch.equal(*ids)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_processor(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no usable processor"):
        load_processor(tmp_path / "empty")
    loaded.tokenizer.pad_token = "<mask>"
    with pytest.raises(ConfigError, match="'pad': 4"):
        check_reserved_ids(loaded, "x")


TASKS = [
    "open the drawer", "", "  two\n\nlines \n", "\n", "12 cups, 3.5 m", "größer 抓取 🤖 \u200b\t|",
    "<start_of", "_image> \u2581x", "a" * 300,
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """The texts that are encoded by the processor itself."""
    made = []
    whole = Gemma3Processor.__call__

    def counted(self, *args, **kwargs):
        made.append(kwargs["text"])
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(Gemma3Processor, "__call__", counted)
    return made


def gemma_like(change):
    """A processor of its own, whose tokenizer is changed before its first prompt."""
    made = build_processor(["pick up the red cube", "open the drawer"])
    change(made.tokenizer)
    return made


def add_line_tokens(tokenizer):  # as the released tokenizer has
    lines = [AddedToken("\n" * n, normalized=False) for n in range(1, 6)]
    tokenizer.add_tokens([*lines, AddedToken("  ", normalized=False)])


def cut_at_words(tokenizer):
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")


def reference(processor, messages):
    out = processor.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    return dict(out)


def assert_equal_inputs(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("change", [lambda _: None, add_line_tokens, cut_at_words])
def test_prompts_are_encoded_as_the_processor_does(change, calls):
    processor = gemma_like(change)
    cases = [
        build_messages(
            task,
            [noise(i) for i in range(views)],
            [f"Camera {i}" for i in range(views)],
            state_bins=bins,
            robot_type=robot,
            num_history=history,
        )
        for task in TASKS
        for views, bins, robot, history in (
            (1, None, None, None), (2, [0, 17, 255], "UR5", None), (3, list(range(14)), "A\n", 2),
        )
    ]  # fmt: skip
    for number, messages in enumerate(cases):
        images = [item["image"] for item in messages[0]["content"] if item["type"] == "image"]
        calls.clear()
        found = encode_messages(processor, messages, images)
        assert len(calls) == (number == 0)  # the first one is checked
        assert_equal_inputs(found, reference(processor, messages))


def test_long_prompts_and_history_are_as_the_processor_makes_them(processor, monkeypatch):
    tokenize = ChatTokenization(processor, max_length=260, is_history=True, max_history_images=4)
    samples = [
        {**make("open the drawer " * n), "images": [noise(1), noise(2)],
         "history_images": [noise(3)] * 2}
        for n in (1, 10, 40)
    ]  # fmt: skip
    found = [tokenize(sample) for sample in samples]
    monkeypatch.setattr(prompt_encoding, "_only_scales", lambda *_: False)
    for sample, one in zip(samples, found, strict=True):
        assert_equal_inputs(one, tokenize(sample))
    assert max(len(one["input_ids"]) for one in found) <= 260


def test_history_pixels_are_those_of_the_image_processor(processor):
    for images in ([noise(1), noise(2)], [noise(1, (40, 30))], [picture(255)]):
        expected = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        assert torch.equal(encode_pictures(processor.image_processor, images), expected)


@pytest.mark.parametrize("label", ["Head", "a <end_of_image>"])  # the second is encoded slowly
def test_bytes_scaled_by_the_model_are_the_processors_pixels(label):
    processor = build_processor(["open the drawer"])
    labels = [label, "Wrist"]
    sample = {**make(views=2), "images": [noise(1), noise(2)]}
    floats = ChatTokenization(processor, image_prompts=labels, is_history=True)
    as_bytes = ChatTokenization(processor, image_prompts=labels, is_history=True, as_bytes=True)
    for _ in range(2):
        history = {"history_images": [noise(3)]}
        expected, found = floats({**sample, **history}), as_bytes({**sample, **history})
        for key in ("pixel_values", "history_pixel_values"):
            assert found[key].dtype == torch.uint8
            assert torch.equal(scale_bytes(found[key]), expected[key])
        assert torch.equal(found["input_ids"], expected["input_ids"])


def test_pictures_that_the_processor_changes_stay_floats():
    processor = build_processor(["open the drawer"])
    tokenize = ChatTokenization(processor, as_bytes=True)
    sample = {**make(views=1), "images": [noise(size=(100, 80))]}
    assert tokenize(sample)["pixel_values"].dtype == torch.float32


class OtherProcessor(Gemma3Processor):
    """Could override anything."""


def other_class(made):
    made.__class__ = OtherProcessor


def set_on_images(**values):
    def change(made):
        for name, value in values.items():
            setattr(made.image_processor, name, value)

    return change


@pytest.mark.parametrize(("change", "image"), [
    (lambda _: None, noise(size=(100, 80))),
    (lambda _: None, noise().convert("L")),
    (other_class, noise()),
    (set_on_images(do_pan_and_scan=True, pan_and_scan_min_crop_size=8, pan_and_scan_max_num_crops=2,
                   pan_and_scan_min_ratio_to_activate=1.0), noise()),
    (set_on_images(image_mean=[0.4, 0.5, 0.5]), noise()),
    (set_on_images(image_std=[0.5, 0.5, 0.2]), noise()),
    (set_on_images(do_normalize=False), noise()),
    (set_on_images(do_rescale=False), noise()),
    (set_on_images(rescale_factor=1 / 256), noise()),
    (lambda made: made.tokenizer.add_tokens(AddedToken("<end_of_image>", lstrip=True,
                                                       normalized=False)), noise()),
])  # fmt: skip
def test_what_is_not_recognised_goes_through_the_processor(change, image, calls, caplog):
    processor = build_processor(["open the drawer"])
    change(processor)
    messages = build_messages("open it", [image], ["Head"])
    for _ in range(2):
        calls.clear()
        found = encode_messages(processor, messages, [image])
        assert len(calls) == 1
        assert_equal_inputs(dict(found), reference(processor, messages))
    assert "otherwise than is usual" not in caplog.text  # known beforehand, not by the first prompt
    expected = processor.image_processor([image], return_tensors="pt")["pixel_values"]
    assert torch.equal(encode_pictures(processor.image_processor, [image]), expected)


def test_a_difference_to_the_processor_is_found_at_once(monkeypatch, caplog, calls):
    processor = build_processor(["open the drawer"])
    monkeypatch.setattr(prompt_encoding, "scale_pixels", lambda images: torch.zeros(1))
    messages = build_messages("open it", [noise()], ["Head"])
    expected = reference(processor, messages)
    calls.clear()
    for number in range(3):
        assert_equal_inputs(dict(encode_messages(processor, messages, [noise()])), expected)
        assert len(calls) == number + 1
    assert caplog.text.count("otherwise than is usual") == 1


def test_labels_that_write_image_tokens_are_left_to_the_processor(processor, calls):
    encode_messages(processor, build_messages("go", [noise()], ["Head"]), [noise()])
    calls.clear()
    messages = build_messages("go", [noise()], ["<image_soft_token> Head"])
    found = encode_messages(processor, messages, [noise()])
    assert len(calls) == 1
    assert_equal_inputs(dict(found), reference(processor, messages))
