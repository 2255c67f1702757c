"""The report: complete, readable offline, safe with any text, and never half written."""

import base64
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from opendm.errors import DataError
from opendm.eval.report import (
    EpisodeView,
    ErrorRow,
    Report,
    format_number,
    ratio_to_better_baseline,
    render_report,
    smooth,
    write_report,
)

HOSTILE = '</td></style><script src="https://evil.example/x.js">\'&</script>'
JPEG = b"\xff\xd8\xff\xe0 any bytes will do \xff\xd9"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags, attributes and texts of a page, with a check that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts, self.cells = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def a_report(word="plain"):
    rng = np.random.default_rng(0)
    true = rng.normal(size=(30, 2))
    predicted = true + 0.1
    predicted[:5] = math.nan
    training = [
        {"step": s, "loss": 1 / (s + 1), "grad_norm": None, "lr": 1e-4, "samples_per_s": 64.0}
        for s in range(40)
    ]
    training[7] |= {"loss": math.nan}
    training[9] |= {"loss": None}
    del training[11]["lr"]
    return Report(
        title=word,
        settings={word: word, "seed": "0"},
        versions={"numpy": word},
        training=training,
        errors=[
            ErrorRow(word, "m", 0.0051, {"untrained": 0.127, word: 0.01642}),
            ErrorRow("gripper", word, 0.25, {"untrained": 0.2}),
        ],
        summary=[word, "xyz error 5.1 mm"],
        episodes=[
            EpisodeView(
                name=word,
                task=word,
                dimensions=[word, "gripper"],
                units=["m", word],
                predicted=predicted,
                true=true,
                frames={word: [(0, JPEG), (17, JPEG)]},
            )
        ],
    )


def test_the_page_loads_nothing_and_runs_nothing():
    text = render_report(a_report())
    page = Page(text)
    assert "http:" not in text
    assert "https:" not in text
    assert "xmlns" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    sources = [value for name, value in page.attributes if name in {"src", "href", "xlink:href"}]
    assert sources
    assert all(source.startswith("data:") for source in sources)


def test_hostile_text_stays_text_wherever_it_appears():
    text = render_report(a_report(HOSTILE))
    page = Page(text)
    assert page.tags == Page(render_report(a_report())).tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert HOSTILE in page.texts
    assert "<script" not in text


def test_gaps_never_reach_the_page_as_numbers():
    text = render_report(a_report())
    assert not re.search(r"\bnan\b|\binf\b|\bNone\b", re.sub(r'src="[^"]*"', "", text))


def test_the_error_table_shows_every_number_in_readable_units_and_the_ratio():
    cells = Page(render_report(a_report())).cells[:10]
    assert cells == [
        *("plain", "mm", "5.10", "127", "16.4", "0.311×"),
        *("gripper", "plain", "0.250", "0.200"),
    ]
    rest = Page(render_report(a_report())).cells[10:12]
    assert rest == ["–", "1.25×"]  # a baseline that this dimension lacks


@pytest.mark.parametrize(
    ("trained", "baselines", "ratio"),
    [
        (1.0, {"a": 4.0, "b": 2.0}, 0.5),
        (3.0, {"a": 2.0}, 1.5),
        (1.0, {"a": math.nan, "b": 2.0}, 0.5),
        (0.0, {"a": 2.0}, 0.0),
        (1.0, {"a": 0.0, "b": 2.0}, math.inf),
        (0.0, {"a": 0.0}, math.nan),
        (1.0, {}, math.nan),
        (math.nan, {"a": 2.0}, math.nan),
    ],
)
def test_the_ratio_compares_with_the_better_baseline(trained, baselines, ratio):
    row = ErrorRow("x", "m", trained, baselines)
    assert ratio_to_better_baseline(row) == pytest.approx(ratio, nan_ok=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123456, "0.0123"),
        (9.996, "10.0"),
        (99.96, "100"),
        (127.4, "127"),
        (-1.5, "-1.50"),
        (3e-7, "3e-07"),
        (math.nan, "–"),
        (math.inf, "∞"),
    ],
)
def test_numbers_keep_three_significant_digits(value, text):
    assert format_number(value) == text


def test_smoothing_keeps_a_constant_and_its_gaps():
    smoothed = smooth([2.0, None, 2.0, math.nan, 2.0], span=20)
    assert smoothed == [pytest.approx(2.0), None, pytest.approx(2.0), None, pytest.approx(2.0)]


def test_smoothing_over_one_value_changes_nothing_and_over_many_damps_noise():
    noise = list(np.random.default_rng(0).normal(size=500))
    assert smooth(noise, span=1) == pytest.approx(noise)
    assert np.std(smooth(noise, span=20)[50:]) < 0.5 * np.std(noise)


def test_frames_come_back_bit_for_bit_with_their_numbers():
    page = Page(render_report(a_report()))
    images = [value for name, value in page.attributes if name == "src"]
    assert [base64.b64decode(image.split(",")[1]) for image in images] == [JPEG, JPEG]
    assert "frame 0" in page.texts
    assert "frame 17" in page.texts


def test_sections_come_in_reading_order():
    page = render_report(a_report())
    order = [
        "xyz error 5.1 mm",
        "Action error",
        "Training",
        "Episode plain",
        "Settings",
        "Versions",
    ]
    places = [page.index(heading) for heading in order]
    assert places == sorted(places)
    assert page.count("<svg") == 3 + 2  # training curves, then one for each dimension


def test_a_report_of_nothing_still_renders():
    page = Page(render_report(Report("empty", {}, {}, [], [], [], [])))
    assert "Not measured." in page.texts
    assert "No metrics recorded." in page.texts


@pytest.mark.parametrize(
    "change",
    [{"true": np.zeros((3, 2))}, {"units": ["m"]}, {"dimensions": ["x"]}],
    ids=["lengths differ", "a unit is missing", "a name is missing"],
)
def test_an_episode_that_does_not_fit_together_is_named(change):
    report = a_report()
    episode = replace(report.episodes[0], **change)
    with pytest.raises(DataError, match="plain"):
        render_report(replace(report, episodes=[episode]))


def test_writing_leaves_the_page_and_nothing_else(tmp_path):
    path = tmp_path / "new" / "report.html"
    write_report(a_report("naïve – ∞"), path)
    assert path.read_text(encoding="utf-8") == render_report(a_report("naïve – ∞"))
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_keeps_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    calls = []

    def fail(source, target):
        calls.append((source.stat().st_size, os.fspath(target)))
        raise OSError("disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk is gone"):
        write_report(a_report(), path)
    size = len(render_report(a_report()).encode())
    assert calls == [(size, os.fspath(path))]  # a whole file was about to be swapped in
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
