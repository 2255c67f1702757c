"""Good JSONL records, and ways to spoil one, each with the field that must be named."""

import json

import numpy as np

CAMERAS = ("images_1", "images_2")
STATE_SIZE = 4
PROMPTS = ("Pull the drawer open", 'Say "a": then é or 開く', "Press: the button")


def good_record(rng):
    """A valid record as a dict."""
    return {
        "images_1": {"type": "image", "url": f"a/{rng.integers(1000)}.jpg"},
        "images_2": {"type": "video", "url": "v.mp4", "frame_idx": int(rng.integers(0, 100))},
        "state": np.round(rng.normal(size=STATE_SIZE), 6).tolist(),
        "action": np.round(rng.normal(size=STATE_SIZE), 6).tolist(),
        "prompt": str(rng.choice(PROMPTS)),
        "is_robot": True,
    }


def encode(record):
    return json.dumps(record, ensure_ascii=False).encode()


def _put(key, value, field=None):
    """Exchange a field."""

    def spoil(record, rng):
        return encode({**record, key: value}), field or key

    return spoil


def _drop(key):
    def spoil(record, rng):
        return encode({k: v for k, v in record.items() if k != key}), key

    return spoil


def _element(key, text):
    """Exchange one number of a vector by some JSON text."""

    def spoil(record, rng):
        place = int(rng.integers(STATE_SIZE))
        values = list(record[key])
        values[place] = "@"
        line = encode({**record, key: values}).replace(b'"@"', text.encode())
        return line, f"{key}[{place}]"

    return spoil


def _picture(key, field, **changes):
    def spoil(record, rng):
        picture = {**record[key], **changes}
        return encode({**record, key: {k: v for k, v in picture.items() if v != "drop"}}), field

    return spoil


def _text(change):
    """Change the bytes; the whole record is bad."""

    def spoil(record, rng):
        return change(encode(record), rng), "record"

    return spoil


def _repeat_key(record, rng):
    return encode(record)[:-1] + b', "state": [9, 9, 9, 9]}', "state"


def _repeat_inner_key(record, rng):
    line = encode(record).replace(b'"type": "image", ', b'"type": "image", "url": "b.jpg", ')
    return line, "images_1.url"


CLASSES = {
    "cut in the middle": _text(lambda line, rng: line[: int(rng.integers(2, len(line) - 1))]),
    "no closing brace": _text(lambda line, rng: line[:-1]),
    "comma at the end": _text(lambda line, rng: line[:-1] + b",}"),
    "single quotes": _text(lambda line, rng: line.replace(b'"', b"'")),
    "text after the object": _text(lambda line, rng: line + b" done"),
    "two objects": _text(lambda line, rng: line + line),
    "a list": _text(lambda line, rng: b"[" + line + b"]"),
    "a number": _text(lambda line, rng: b"17"),
    "a string": _text(lambda line, rng: b'"frame"'),
    "null": _text(lambda line, rng: b"null"),
    "latin-1": _text(lambda line, rng: line.replace(b'"prompt": "', b'"prompt": "\xe9')),
    "utf-16": _text(lambda line, rng: line.decode().encode("utf-16-le").replace(b"\n", b"")),
    "zero byte": _text(lambda line, rng: line.replace(b'"prompt": "', b'"prompt": "\0')),
    "lone surrogate": _text(lambda line, rng: line.replace(b'"prompt": "', b'"prompt": "\\ud800')),
    "byte order mark": _text(lambda line, rng: b"\xef\xbb\xbf" + line),
    "200,000 brackets": _text(lambda line, rng: b"[" * 200_000),
    "key twice": _repeat_key,
    "inner key twice": _repeat_inner_key,
    "no prompt": _drop("prompt"),
    "prompt null": _put("prompt", None),
    "prompt number": _put("prompt", 5),
    "prompt list": _put("prompt", ["go"]),
    "prompt empty": _put("prompt", ""),
    "prompt blank": _put("prompt", " \t "),
    "prompt of 1 MB": _put("prompt", "go " * 350_000),
    "no state": _drop("state"),
    "state null": _put("state", None),
    "state text": _put("state", "[1, 2, 3, 4]"),
    "state object": _put("state", {"x": 1.0}),
    "state empty": _put("state", []),
    "state short": _put("state", [0.0] * (STATE_SIZE - 1)),
    "state long": _put("state", [0.0] * (STATE_SIZE + 1)),
    "state true": _element("state", "true"),
    "state string": _element("state", '"1.5"'),
    "state null inside": _element("state", "null"),
    "state NaN": _element("state", "NaN"),
    "state Infinity": _element("state", "Infinity"),
    "state 1e999": _element("state", "1e999"),
    "state 400 digits": _element("state", "7" * 400),
    "state nested": _element("state", "[1.0]"),
    "no action": _drop("action"),
    "action null": _put("action", None),
    "action empty": _put("action", []),
    "action short": _put("action", [0.0] * (STATE_SIZE - 1)),
    "action false": _element("action", "false"),
    "action -Infinity": _element("action", "-Infinity"),
    "action null inside": _element("action", "null"),
    "no camera": _drop("images_2"),
    "camera null": _put("images_1", None),
    "camera text": _put("images_1", "a/1.jpg"),
    "camera list": _put("images_1", ["a/1.jpg"]),
    "no url": _picture("images_1", "images_1.url", url="drop"),
    "url number": _picture("images_1", "images_1.url", url=7),
    "url empty": _picture("images_1", "images_1.url", url=""),
    "unknown type": _picture("images_1", "images_1.type", type="gif"),
    "type null": _picture("images_1", "images_1.type", type=None),
    "no frame number": _picture("images_2", "images_2.frame_idx", frame_idx="drop"),
    "frame -1": _picture("images_2", "images_2.frame_idx", frame_idx=-1),
    "frame 1.0": _picture("images_2", "images_2.frame_idx", frame_idx=1.0),
    "frame true": _picture("images_2", "images_2.frame_idx", frame_idx=True),
    "frame text": _picture("images_2", "images_2.frame_idx", frame_idx="1"),
}
"""Name to a function of (record, rng) that gives the spoilt line and the field to name."""


def write_good(folder, rng, *, num_files=20, num_frames=40):
    """Valid episodes, in all the ways in which a valid line may be written; lines by file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number in range(num_files):
        lines = []
        for _ in range(num_frames):
            record = good_record(rng)
            style = int(rng.integers(6))
            if style == 1:
                line = json.dumps(record, separators=(",", ":")).encode()
            elif style == 2:
                line = json.dumps(record, separators=(" ,  ", " : ")).encode() + b"\r"
            elif style == 3:
                extra = {"deep": {"a": {"a": [1, None]}}, "big": 10**30, "none": None}
                line = encode({**record, **extra})
            elif style == 4:
                line = encode({**record, "state": [0, -1, 2**40, 1e-300]})
            else:
                line = encode(record)
            lines.append(line)
            if style == 5:
                lines.append(b" \t ")  # a blank line is no record
        files[folder / f"sub{number % 3}" / f"episode_{number:03d}.jsonl"] = lines
    save(files)
    return files


def save(files):
    for path, lines in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(lines) + b"\n")


def spoil_records(files, count, rng):
    """Spoil ``count`` records in place, every class in turn; ``(where, field, class)`` of each."""
    places = [
        (path, number)
        for path, lines in files.items()
        for number, line in enumerate(lines)
        if line.strip()
    ]
    names = list(CLASSES)
    expected = []
    for turn, place in enumerate(rng.permutation(len(places))[:count]):
        path, number = places[place]
        name = names[turn % len(names)]
        record = json.loads(files[path][number])
        files[path][number], field = CLASSES[name](record, rng)
        expected.append((f"{path}:{number + 1}", field, name))
    save(files)
    return expected
