"""JSONL episodes: what is read equals a plain reader's, and what is wrong is named or left out."""

import hashlib
import json
import math
import multiprocessing
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data import episodes, jsonl_pieces, jsonl_scan
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import open_source
from opendm.data.jsonl_source import MAX_OPEN_FILES, scan_jsonl
from opendm.data.selection import usable_episodes
from opendm.data.transforms import BuildAction, BuildActionChunk
from opendm.dataset.register import dataset_fields
from opendm.errors import ConfigError, DataError

HORIZON = 7


def frame(t=0, **changes):
    return {"state": [float(t), 0.5], "action": [t + 0.25, -1.0], "prompt": "go"} | changes


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def plain_samples(folder, horizon, *, is_gripper=None):
    """Every sample of a folder, by the formulas of the public framework in plain Python."""
    for path in sorted(Path(folder).rglob("*.jsonl")):
        frames = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
        has_actions = "action" in frames[0]
        for t in range(len(frames) if has_actions else len(frames) - 1):
            later = frames[t:] if has_actions else frames[t + 1 :]
            rows = [f["action" if has_actions else "state"] for f in later[:horizon]]
            mask = [True] * len(rows) + [False] * (horizon - len(rows))
            rows += [rows[-1]] * (horizon - len(rows))
            if is_gripper is not None:
                rows = [
                    [
                        v if keep else v - s
                        for v, s, keep in zip(row, frames[t]["state"], is_gripper, strict=True)
                    ]
                    for row in rows
                ]
            yield path, t, frames[t], np.float32(rows)[None], mask


@pytest.mark.parametrize("name", ["demo", "demo_heldout"])
def test_samples_are_bit_for_bit_those_of_a_plain_reader(name):
    fields = dataset_fields(name)
    folder = fields["jsonl_dir"]
    transform = BuildAction(HORIZON, ActionMode.RELATIVE)
    dataset = JsonlDataset(folder, transform, name, fields)
    is_gripper = [part == RobotStateDesc.GRIPPER for part in fields["state_desc"]]
    count = 0
    for index, expected in enumerate(plain_samples(folder, HORIZON, is_gripper=is_gripper)):
        path, t, record, action, mask = expected
        sample = dataset[index]
        assert sample["action"].tobytes() == action.tobytes()
        assert sample["action"].dtype == np.float32
        assert sample["state"].tobytes() == np.float32(record["state"]).tobytes()
        assert sample["action_mask"].shape == action.shape
        assert sample["action_mask"][0].all(-1).tolist() == mask
        assert sample["meta_data"]["frame_index"] == t
        assert sample["meta_data"]["episode_path"] == str(path)
        assert {k: sample[k] for k in record if k not in ("state", "action")} == {
            k: v for k, v in record.items() if k not in ("state", "action")
        }
        count += 1
    assert count == len(dataset)


def test_lines_are_read_lazily_and_are_the_files(tmp_path):
    path = write(tmp_path / "a.jsonl", [frame(t) for t in range(5)])
    path.write_text("\r\n\n" + path.read_text().replace("\n", "\r\n"))
    lines = JsonlDataset(str(tmp_path))[3]["raw_lines"]
    expected = [line for line in path.read_text().split("\n") if line.strip()]
    assert list(lines) == expected
    assert [lines[-1], lines[1:3]] == [expected[-1], expected[1:3]]
    with pytest.raises(IndexError):
        lines[5]
    np.testing.assert_array_equal(lines.vectors("action", 1, 3), [[1.25, -1], [2.25, -1]])


def test_plain_lines_give_the_same_chunk(tmp_path):
    write(tmp_path / "a.jsonl", [frame(t) for t in range(5)])
    dataset, chunk = JsonlDataset(str(tmp_path)), BuildActionChunk(3)
    for index in range(5):
        lazy, plain = dataset[index], dataset[index]
        plain["raw_lines"] = list(plain["raw_lines"])
        for key in ("state", "action", "action_mask"):
            np.testing.assert_array_equal(chunk(dict(lazy))[key], chunk(dict(plain))[key])


def test_plain_lines_name_the_bad_one(tmp_path):
    path = write(tmp_path / "a.jsonl", ["", frame(0), frame(1, action=[1.0])])
    sample = frame(0) | {
        "raw_lines": [line for line in path.read_text().split("\n") if line],
        "meta_data": {"frame_index": 0, "episode_path": str(path)},
    }
    with pytest.raises(DataError, match=f"{path}:3: this frame: action has 1 values, expected 2"):
        BuildActionChunk(2)(sample)


BAD = {
    "cut": ('{"state":[0.1,0.2', "is not valid JSON (Expecting ',' delimiter"),
    "a list": ("[1]", "holds a list; expected a JSON object"),
    "a number": ("3", "holds a int; expected a JSON object"),
    "two objects": (json.dumps(frame()) * 2, "is not valid JSON (Extra data"),
    "not UTF-8": (b'{"prompt": "\xff"}', "is not UTF-8 text (invalid start byte at byte 13"),
    "deep": ("[" * 100_000, "is not valid JSON"),
    "null": (frame(state=[0.1, None]), ": state[1] is None; expected a finite number"),
    "NaN": ('{"state": [NaN, 1], "action": [1, 2], "prompt": ""}', ": state[0] is nan;"),
    "Infinity": (
        '{"state": [1, -Infinity], "action": [1, 2], "prompt": ""}',
        ": state[1] is -inf;",
    ),
    "1e999": ('{"state": [1, 2], "action": [1e999, 2], "prompt": ""}', ": action[0] is inf;"),
    "too big": (frame(state=[1, 10**400]), ": state[1] is 1000000000"),
    "far too big": ('{"state": [1%s], "prompt": ""}' % ("0" * 5000), "is not valid JSON (Exceeds"),
    "text": (frame(action=["1.5", 2]), ": action[0] is '1.5'; expected a finite number"),
    "true": (frame(state=[True, 2.0]), ": state[0] is True; expected a finite number"),
    "nested": (frame(state=[[1.0], 2.0]), ": state[0] is [1.0]; expected a finite number"),
    "no list": (frame(state=1.0), ": state is 1.0; expected a list of numbers"),
    "empty": (frame(action=[]), ": action is []; expected a list of numbers"),
    "short": (frame(state=[1.0]), ": state has 1 values, expected 2 (as in the frames before"),
    "long": (frame(action=[1.0] * 3), ": action has 3 values, expected 2"),
    "no state": ({"action": [1, 2], "prompt": ""}, ": field 'state' is missing; every frame"),
    "no action": ({"state": [1, 2], "prompt": ""}, ": field 'action' is missing; every frame"),
    "no prompt": ({"state": [1, 2], "action": [1, 2]}, ": field 'prompt' is missing; every frame"),
    "prompt": (frame(prompt=None), ": prompt is None; expected a text"),
}


def write_bad(folder, line):
    """A bad record as line 6 of the second file, after three good frames and two blank lines."""
    write(folder / "a.jsonl", [frame(t) for t in range(4)])
    path = write(folder / "b.jsonl", ["", frame(0), frame(1), "  ", frame(2), "BAD", "", frame(4)])
    text = line if isinstance(line, bytes | str) else json.dumps(line)
    path.write_bytes(
        path.read_bytes().replace(b"BAD", text if isinstance(text, bytes) else text.encode())
    )
    return path


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named_by_file_line_and_field(tmp_path, case):
    line, expected = BAD[case]
    path = write_bad(tmp_path, line)
    with pytest.raises(DataError) as caught:
        scan_jsonl(tmp_path, skip_bad=False)
    assert str(caught.value).startswith(f"{path}:6{expected if expected[0] == ':' else ''}")
    assert expected in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_skipping_ends_the_episode_before_it_and_counts_what_is_lost(tmp_path, case):
    line, _ = BAD[case]
    write_bad(tmp_path, line)
    index = scan_jsonl(tmp_path, skip_bad=True)
    assert index.starts.tolist() == [0, 4, 7]
    np.testing.assert_array_equal(index.state[:, 0], [0, 1, 2, 3, 0, 1, 2])
    (dropped,) = index.dropped
    assert dropped.startswith("b.jsonl:6")
    assert dropped.endswith("(2 frames from here on left out)")


def test_a_line_that_is_no_frame_by_its_length_is_refused(tmp_path, monkeypatch):
    for module in (episodes, jsonl_pieces):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 200)
    path = write(tmp_path / "a.jsonl", [frame(0), frame(1), frame(2, extra="x" * 200)])
    with pytest.raises(DataError, match=rf"{path}:3: the line has \d+ bytes; a frame has at most"):
        scan_jsonl(tmp_path, skip_bad=False)


def test_an_episode_that_records_actions_late_is_refused(tmp_path):
    rows = [frame(0), frame(1)]
    del rows[0]["action"]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=rf"{path}:2: action is recorded here and not in .* first"):
        scan_jsonl(tmp_path, skip_bad=False)


def test_episodes_with_and_without_actions_live_together(tmp_path):
    write(tmp_path / "a.jsonl", [{"state": [t, 0], "prompt": ""} for t in range(3)])
    write(tmp_path / "b.jsonl", [frame(t) for t in range(3)])
    index = scan_jsonl(tmp_path, skip_bad=False)
    assert index.has_actions.tolist() == [False, True]
    assert [index.num_samples(number) for number in range(2)] == [2, 3]
    assert np.isnan(index.action[:3]).all()
    assert np.isfinite(index.action[3:]).all()
    chunk = JsonlDataset(str(tmp_path), BuildActionChunk(2))[1]["action"]
    assert chunk[0].tolist() == [[2, 0], [2, 0]]


def is_good(line):
    """Whether a record is what the first one says; a second opinion, written apart."""
    try:
        record = json.loads(line)
        vectors = [record["state"], record["action"]]
        numbers = [v for vector in vectors for v in vector]
        return (
            all(type(vector) is list and len(vector) == 2 for vector in vectors)
            and all(type(v) in (int, float) and abs(v) <= 1.8e308 and v == v for v in numbers)
            and type(record["prompt"]) is str
        )
    except (ValueError, KeyError, TypeError):
        return False


def test_300_random_damages_are_judged_as_by_a_second_opinion(tmp_path):
    rng = np.random.default_rng(5)
    good = json.dumps(frame(3, extra={"a": [1e-7, None]}))
    path = tmp_path / "a.jsonl"
    verdicts = []
    for _ in range(300):
        line = list(good)
        for _ in range(rng.integers(1, 3)):
            place = int(rng.integers(len(line)))
            line[place] = str(rng.choice(list('0123456789.eE-+,[]{}":ntfN \x00é')))
        text = "".join(line)
        path.write_text(f"{good}\n{text}\n{good}\n", encoding="utf-8")
        index = scan_jsonl(tmp_path, skip_bad=True)
        assert index.num_frames == (3 if is_good(text) else 1), text
        verdicts.append(is_good(text))
    assert 20 < sum(verdicts) < 280


def test_two_processes_and_cut_files_give_the_same_index(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for number, count in enumerate((400, 1, 0, 37, 250)):
        rows = [frame(t, prompt=f"task {rng.integers(5)}") for t in range(count)]
        lines = [text for row in rows for text in ([row, ""] if rng.random() < 0.1 else [row])]
        write(tmp_path / f"{number}.jsonl", lines)
    write(tmp_path / "bad.jsonl", [*map(frame, range(300)), "{", *map(frame, range(200))])
    whole = scan_jsonl(tmp_path, skip_bad=True)
    monkeypatch.setattr(jsonl_scan, "PIECE_BYTES", 2000)
    monkeypatch.setattr(jsonl_scan, "FORK_BYTES", 1)
    monkeypatch.setattr(jsonl_pieces, "BLOCK_BYTES", 300)
    assert len(jsonl_scan._cut(tmp_path, jsonl_scan.list_jsonl(tmp_path).files)) > 10
    parts = scan_jsonl(tmp_path, skip_bad=True)
    for name in ("files", "episodes", "tasks", "dropped"):
        assert getattr(parts, name) == getattr(whole, name)
    for name in ("starts", "state", "action", "task", "position", "num_bytes", "has_actions"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert "bad.jsonl:301" in whole.dropped[0]
    assert "(201 frames" in whole.dropped[0]


def test_the_fingerprint_is_that_of_names_and_contents(tmp_path):
    write(tmp_path / "b" / "x.jsonl", [frame(0)])
    write(tmp_path / "a.jsonl", [frame(1)])
    (tmp_path / "empty.jsonl").write_text("")
    for folder in (tmp_path, Path(dataset_fields("demo")["jsonl_dir"])):
        digest = hashlib.sha256()
        for path in sorted(folder.rglob("*.jsonl")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        assert scan_jsonl(folder, skip_bad=False).fingerprint() == digest.hexdigest()


def test_all_names_that_are_no_files_are_listed_in_one_error(tmp_path):
    write(tmp_path / "good.jsonl", [frame(0)])
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        open_source(tmp_path)
    message = str(caught.value)
    assert message.startswith("4 of the *.jsonl names are no files")
    for name in ("folder.jsonl is a folder", "pipe.jsonl is a pipe", "loop.jsonl leads nowhere",
                 "gone.jsonl leads nowhere"):  # fmt: skip
        assert f"{tmp_path}/{name}" in message


def test_a_file_with_two_names_counts_once_and_is_reported(tmp_path, caplog):
    write(tmp_path / "a.jsonl", [frame(t) for t in range(3)])
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert len(JsonlDataset(str(tmp_path))) == 3
    assert "b.jsonl: the same file as a.jsonl; counted once" in caplog.text
    JsonlDataset(str(tmp_path))
    assert len(caplog.records) == 1


def test_episodes_without_a_sample_are_counted_in_one_line(tmp_path, caplog):
    write(tmp_path / "a.jsonl", [frame(t) for t in range(3)])
    write(tmp_path / "one.jsonl", [{"state": [1, 2], "prompt": ""}])
    (tmp_path / "zero.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    dataset = JsonlDataset(str(tmp_path))
    assert [episode.name for episode in dataset.episodes] == ["a.jsonl"]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: 3 of 4 episodes have no frame to train on (2 are empty)"
    ]


def test_a_changed_file_is_named_and_not_read_wrongly(tmp_path):
    path = write(tmp_path / "a.jsonl", [frame(t) for t in range(4)])
    dataset = JsonlDataset(str(tmp_path))
    dataset[0]
    with path.open("a") as file:
        file.write(json.dumps(frame(4)) + "\n")
    with pytest.raises(DataError, match=rf"^{path} has changed since it was indexed"):
        dataset[1]
    path.unlink()
    fresh = JsonlDataset(str(write(tmp_path / "b" / "a.jsonl", [frame(0)]).parent))
    (tmp_path / "b" / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read"):
        fresh[0]


def test_open_files_are_few(tmp_path):
    count = MAX_OPEN_FILES + 20
    for number in range(count):
        write(tmp_path / f"{number:03d}.jsonl", [frame(number)])
    dataset = JsonlDataset(str(tmp_path))
    assert [dataset[index]["state"][0] for index in range(count)] == list(range(count))
    descriptors = list(dataset.source._open_files._descriptors.values())
    assert len(descriptors) == MAX_OPEN_FILES
    names = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in descriptors}
    assert names == {str(tmp_path / f"{number:03d}.jsonl") for number in range(20, count)}
    dataset.source._open_files.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_subset_has_exactly_its_frames(tmp_path):
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 6, 12)
    for number, length in enumerate(lengths):
        write(tmp_path / f"{number:02d}.jsonl", [frame(100 * number + t) for t in range(length)])
    source = open_source(tmp_path)
    for _ in range(40):
        subset = rng.permutation(12)[: rng.integers(1, 12)].tolist()
        expected = [100 * number + t for number in subset for t in range(lengths[number])]
        if not expected:
            continue
        dataset = JsonlDataset(str(tmp_path), BuildActionChunk(1), source=source, episodes=subset)
        samples = [dataset[index] for index in range(len(dataset))]
        assert [sample["state"][0] for sample in samples] == expected
        assert [sample["action"][0, 0, 0] for sample in samples] == [x + 0.25 for x in expected]
        for index, value in enumerate(expected):
            place, t = dataset.locate(index)
            assert 100 * dataset.episodes[place].number + t == value
        with pytest.raises(IndexError):
            dataset[len(expected)]
    for wrong in ([12], [-1], [3, 3]):
        with pytest.raises(ConfigError, match="episodes"):
            usable_episodes(source, wrong)


def test_loader_workers_read_what_the_main_process_reads():
    fields = dataset_fields("demo_heldout")
    dataset = JsonlDataset(fields["jsonl_dir"], BuildAction(3), "demo_heldout", fields)
    dataset[0]  # a file is open when the workers start
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork",
        sampler=range(0, len(dataset), 5), collate_fn=only_numbers,
    )  # fmt: skip
    for index, (state, action) in zip(range(0, len(dataset), 5), loader, strict=True):
        sample = dataset[index]
        assert state == sample["state"].tobytes()
        assert action == sample["action"].tobytes()


def test_a_spawned_process_gets_the_dataset_by_the_path_of_its_index(tmp_path, run_python):
    write(tmp_path / "a.jsonl", [frame(t) for t in range(300)])
    dataset = JsonlDataset(str(tmp_path))
    expected = dataset[7]["state"], dataset[7]["raw_lines"].vectors("action", 3, 5).tolist()
    (tmp_path / "dataset.pickle").write_bytes(pickle.dumps(dataset))
    assert (tmp_path / "dataset.pickle").stat().st_size < 2000
    code = (
        "import pickle, sys\n"
        "sample = pickle.load(open(sys.argv[1], 'rb'))[7]\n"
        "print((sample['state'], sample['raw_lines'].vectors('action', 3, 5).tolist()))"
    )
    done = run_python("-c", code, str(tmp_path / "dataset.pickle"))
    assert done.stdout.strip() == str(expected), done.stderr


def only_numbers(sample):
    return sample["state"].tobytes(), sample["action"].tobytes()


def memory_of_reads(folder, queue):
    dataset = JsonlDataset(str(folder), BuildAction(20), "x", {"state_desc": ["eef", "gripper"]})
    rng = np.random.default_rng(0)
    peaks = []
    for _ in range(2):
        for index in rng.integers(len(dataset), size=1000):
            dataset[int(index)]
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    queue.put(peaks)


def test_memory_stays_flat_over_2000_random_samples(tmp_path):
    filler = {"note": "x" * 300}
    for number in range(60):
        write(tmp_path / f"{number}.jsonl", [frame(t, extra=filler) for t in range(500)])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=memory_of_reads, args=(tmp_path, queue))
    process.start()
    first, second = queue.get(timeout=60)
    process.join()
    assert second - first < 1024, f"{first} -> {second} KiB"


def test_a_last_line_without_end_and_numbers_keep_all_their_digits(tmp_path):
    values = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 2**63 + 1, -0.0, math.pi]
    row = {"state": values, "prompt": "é \u4e2d"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row, ensure_ascii=False)}")
    index = scan_jsonl(tmp_path, skip_bad=False)
    assert index.num_frames == 2
    assert index.tasks == ("é \u4e2d",)
    assert index.state.tobytes() == np.array([values, values], np.float64).tobytes()


def test_a_field_that_nobody_reads_may_hold_anything(tmp_path):
    write(tmp_path / "a.jsonl", ['{"state": [1.0], "prompt": "p", "extra": [NaN, 1e999]}'] * 2)
    dataset = JsonlDataset(str(tmp_path))
    assert math.isnan(dataset[0]["extra"][0])
