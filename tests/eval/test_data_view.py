"""The page of a dataset: complete, self-contained, and safe with any text in the data."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from opendm.cli import main
from opendm.data.transforms.normalization import normalize
from opendm.dataset.register import CONVERSATION_DATA
from opendm.eval.data_view import floored_statistics

EVIL = '<script>alert("x")</script> & <img src=http://example.com/a.png>'
VOID = {"meta", "img", "path"}


class Page(HTMLParser):
    """Tags in balance, attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENDM_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "set"
    root.mkdir()
    rng = np.random.default_rng(0)
    for episode in range(5):
        lines = []
        for frame in range(10 + episode):
            url = f"{episode}_{frame}.jpg"
            Image.fromarray(rng.integers(0, 255, (300, 400, 3), dtype=np.uint8)).save(root / url)
            state = rng.normal(size=3)
            lines.append(json.dumps({
                "images_1": {"type": "image", "url": url},
                "state": state.tolist(),
                "action": (state + 0.1).tolist(),
                "prompt": EVIL if episode else "go",
            }))  # fmt: skip
        (root / f"e{episode}.jsonl").write_text("\n".join(lines))
    (root / "0_0.jpg").write_bytes(b"no picture")
    fields = {
        "jsonl_dir": str(root),
        "image_dir": str(root),
        "image_keys": ["images_1"],
        "image_prompts": ["Head"],
        "state_desc": ["joint", "joint", "gripper"],
    }
    monkeypatch.setitem(CONVERSATION_DATA, "viewed_set", fields)
    return root


def view(tmp_path, *words):
    output = tmp_path / "out" / "page.html"
    assert main(["data", "view", *words, "--output", str(output), "--chunk-size", "4"]) == 0
    return output.read_text()


def test_the_page_shows_all_and_needs_nothing_else(folder, tmp_path):
    text = view(tmp_path, "viewed_set")
    page = Page(text)
    assert page.open == []
    words = " ".join(page.text)
    assert "e0.jsonl" in words
    assert "e4.jsonl" in words
    assert words.count(EVIL) >= 1
    assert "60" in words  # frames
    names = {name for name, _ in page.attributes}
    assert not names & {"href", "onload", "onerror", "onclick"}
    sources = [value for name, value in page.attributes if name == "src"]
    assert sources
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not set(page.tags) & {"script", "link", "iframe", "object", "a"}
    assert "url(" not in text
    assert any("default-src 'none'" in (value or "") for _, value in page.attributes)


def test_episodes_curves_and_histograms_are_there_for_every_dimension(folder, tmp_path):
    page = Page(view(tmp_path, "viewed_set"))
    charts = page.tags.count("svg")
    assert charts == 1 + 3 * 3 + 3  # lengths, three episodes of three dimensions, histograms
    pictures = page.tags.count("img")
    assert pictures == 3 * 5 - 1  # one file is no picture
    assert "0_0.jpg" in " ".join(page.text)  # and is said to be none


def test_thumbnails_are_small(folder, tmp_path):
    assert len(view(tmp_path, "viewed_set")) < 400_000


def test_a_folder_can_be_viewed_without_registration(folder, tmp_path):
    assert "images_1" in view(tmp_path, str(folder))


def test_an_unknown_dataset_exits_2(tmp_path, capsys):
    assert main(["data", "view", "no_such", "--output", str(tmp_path / "x.html")]) == 2
    assert "no_such" in capsys.readouterr().err


def test_only_the_episodes_of_the_registration_are_shown(folder, tmp_path, monkeypatch):
    fields = CONVERSATION_DATA["viewed_set"]
    monkeypatch.setitem(CONVERSATION_DATA, "part_set", {**fields, "episodes": [0]})
    words = " ".join(Page(view(tmp_path, "part_set")).text)
    assert "Episode e0.jsonl" in words
    assert "e1.jsonl" not in words
    assert "e4.jsonl" not in words
    assert EVIL not in words  # the task of all others
    assert "frames 10 " in words


def test_ranges_are_widened_as_in_training(folder, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(5000, 3))
    rows[:, 1] = 1.5 + 1e-5 * rows[:, 1]
    stats = floored_statistics(rows, ["joint", "joint", "joint"])
    assert normalize(rows, stats)[:, 1].std() < 0.01
    assert normalize(rows, stats)[:, 0].std() > 0.3
    for number in range(5):
        path = folder / f"e{number}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for frame, line in enumerate(lines):
            line["state"][1], line["action"][1] = 1.0, 1.0 + 1e-7 * frame
        path.write_text("\n".join(map(json.dumps, lines)))
    words = " ".join(Page(view(tmp_path, "viewed_set")).text)
    low, high = re.search(r"1 \(joint\): q01 (\S+), q99 (\S+)", words).groups()
    assert float(high) - float(low) > 1e-3  # 1 % of the other joint's range
