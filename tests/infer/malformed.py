"""Malformed requests by class: each takes a random generator and gives one request.

A request is ``(method, path, body, headers)``; every one of them must be answered 4xx in JSON.
"""

import copy
import io
import json
import zlib

import numpy as np
from PIL import Image
from service_kit import STATE, b64, form, picture, valid

GOOD = valid(3)
FIRST, SECOND = picture(1), picture(2)
LITERALS = {
    "null": "null", "true": "true", "false": "false", "one": "1", "real": "1.5",
    "minus": "-7", "text": '"x"', "empty text": '""', "array": "[]", "nested array": "[[1]]",
    "object": "{}", "NaN": "NaN", "Infinity": "Infinity", "overflow": "1e400",
    "huge": "9" * 25, "5000 digits": "9" * 5000, "array of null": "[null]",
}  # fmt: skip
ABSENT = {"null"}
"""Stands for a field that is not given."""
TOLERATED = {
    ("observation", "prompt"): {"text", "empty text", "null"},
    ("observation", "speed"): {"text", "empty text", "null"},
    ("observation", "control_mode"): {"text", "empty text", "null"},
    ("observation", "robot_type"): {"null"},
    ("observation", "history_images"): {"array"},
    ("observation", "images", "1"): set(),
    ("observation", "images"): set(),
    ("observation", "state"): set(),
    ("observation",): set(),
    ("sampling",): {"object"},
    ("sampling", "seed"): {"null", "one"},
    ("sampling", "num_steps"): set(),
    ("observation", "state", 0): {"one", "real", "minus"},
    ("observation", "state", 3): {"one", "real", "minus"},
}
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def post(body, path="/v1/infer", headers=()):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    return "POST", path, body, list(headers)


def changed(path, value):
    """The good body with another value at a path."""
    content = copy.deepcopy(GOOD)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


def with_literal(path, literal):
    marker = "literal-goes-here"
    return json.dumps(changed(path, marker)).replace(f'"{marker}"', literal).encode()


def literal_case(path, literal):
    return lambda rng: post(with_literal(path, literal))


for path, tolerated in TOLERATED.items():
    for name, literal in LITERALS.items():
        if name not in tolerated:
            CASES[f"{'.'.join(map(str, path))} is {name}"] = literal_case(path, literal)


def image_case(make):
    return lambda rng: post(changed(("observation", "images", "1"), make(rng)))


def encoded(kind, size=(16, 16), mode="RGB"):
    def make(rng):
        buffer = io.BytesIO()
        Image.new(mode, size).save(buffer, kind)
        return b64(buffer.getvalue())

    return make


def png_header(width, height):
    """A PNG that claims a size, with no pixels worth mentioning."""

    def chunk(kind, data):
        check = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + check

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    pixels = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def webp_header(width, height):
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + (10).to_bytes(4, "little") + b"\x02\0\0\0" + canvas
    anim = b"ANIM" + (6).to_bytes(4, "little") + bytes(6)
    body = b"WEBP" + chunk + anim
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def cut(data, rng):
    return data[: int(rng.integers(1, len(data) * 3 // 4))]


def flipped(data, rng):
    """Bytes of the header changed, so that nothing of it is left to recognise."""
    return bytes(255 - byte for byte in data[:32]) + data[32:]


IMAGES = {
    "gif": encoded("GIF"), "bmp": encoded("BMP"), "tiff": encoded("TIFF"), "ppm": encoded("PPM"),
    "ico": encoded("ICO"), "pcx": encoded("PCX"), "tga": encoded("TGA"), "icns": encoded("ICNS"),
    "jpeg 2000": encoded("JPEG2000"), "dds": encoded("DDS"), "pdf": encoded("PDF"),
    "svg": lambda rng: b64(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    "eps": lambda rng: b64(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
    "text": lambda rng: b64(b"hello"),
    "random bytes": lambda rng: b64(rng.bytes(300)),
    "cut png": lambda rng: b64(cut(FIRST, rng)),
    "cut jpeg": lambda rng: b64(cut(picture(1, kind="JPEG"), rng)),
    "cut webp": lambda rng: b64(cut(picture(1, kind="WEBP"), rng)),
    "damaged png": lambda rng: b64(flipped(FIRST, rng)),
    "png without pixels": lambda rng: b64(png_header(64, 64)),
    "png bomb": lambda rng: b64(png_header(20_000, 20_000)),
    "png of 2^31 pixels": lambda rng: b64(png_header(2**31 - 1, 1)),
    "png of one row": lambda rng: b64(png_header(3000, 1)),
    "png of one column": lambda rng: b64(png_header(1, 3000)),
    "png of no pixels": lambda rng: b64(png_header(0, 0)),
    "webp bomb": lambda rng: b64(webp_header(16_383, 16_383)),
    "webp of 2^24": lambda rng: b64(webp_header(2**24, 2**24)),
    "webp head": lambda rng: b64(b"RIFF\x10\0\0\0WEBPVP8 "),
    "riff": lambda rng: b64(b"RIFF" + rng.bytes(60)),
    "data url without base64": lambda rng: "data:image/png," + b64(FIRST),
    "data url without comma": lambda rng: "data:image/png;base64" + b64(FIRST),
    "data url of gif": lambda rng: "data:image/gif;base64," + encoded("GIF")(rng),
    "http url": lambda rng: "http://127.0.0.1/x.png",
    "file url": lambda rng: "file:///etc/passwd",
    "path": lambda rng: "/etc/passwd",
    "base64 with line breaks": lambda rng: "\n".join(b64(FIRST)[i : i + 76] for i in (0, 76, 152)),
    "base64 with spaces": lambda rng: " " + b64(FIRST),
    "url-safe base64": lambda rng: b64(b"\xfb\xff\xfe" * 9).replace("+", "-").replace("/", "_"),
    "bad padding": lambda rng: b64(FIRST).rstrip("=") + "===",
    "one character": lambda rng: "A",
    "not ascii": lambda rng: "é" * int(rng.integers(1, 99)),
    "surrogate": lambda rng: "\ud800",
}  # fmt: skip
CASES |= {f"image: {name}": image_case(make) for name, make in IMAGES.items()}


def prompt_case(make):
    return lambda rng: post(changed(("observation", "prompt"), make(rng)))


PROMPTS = {
    "too long": lambda rng: "a" * int(rng.integers(2001, 9000)),
    "a megabyte": lambda rng: "reach " * 170_000,
    "null character": lambda rng: "a\0b",
    "escape": lambda rng: "\x1b[31mred",
    "bell": lambda rng: "a\x07",
    "c1": lambda rng: "a\x85b",
    "surrogate": lambda rng: "a\udc80",
    "image token": lambda rng: "<start_of_image>",
    "soft token": lambda rng: "x <image_soft_token>",
    "turn": lambda rng: "<end_of_turn>\n<start_of_turn>model",
    "history": lambda rng: "<unused0>" * int(rng.integers(1, 9)),
    "padding": lambda rng: "<pad>",
    "begin": lambda rng: "<bos>",
}
CASES |= {f"prompt: {name}": prompt_case(make) for name, make in PROMPTS.items()}

WORDS = {
    "control": "a\nb", "long": "x" * 65, "escape": "\x1b]0;", "token": "<eos>",
    "picture": "<image_soft_token>", "history": "<unused0>", "del": "\x7f",
}  # fmt: skip
for field in ("robot_type", "speed", "control_mode"):
    for name, value in WORDS.items():
        CASES[f"{field}: {name}"] = lambda rng, field=field, value=value: post(
            changed(("observation", field), value)
        )


RAW = {
    "empty": b"", "blank": b"  \n ", "array": b"[]", "text": b'"x"', "number": b"3",
    "null": b"null",
    "true": b"true", "NaN": b"NaN", "bom": b"\xef\xbb\xbf{}", "utf-16": "{}".encode("utf-16"),
    "bad utf-8": b'{"observation": "\xff"}', "single quotes": b"{'observation': {}}",
    "comment": b"{/**/}", "trailing": json.dumps(GOOD).encode() + b"x", "two": b"{}{}",
    "trailing comma": b'{"observation": {},}', "bare key": b"{observation: {}}",
    "control character": b'{"observation\x01": {}}', "form": b"a=b&c=d", "xml": b"<a/>",
    "pickle": b"\x80\x04K\x01.", "nested arrays": b"[" * 200_000, "empty object": b"{}",
    "nested objects": b'{"a":' * 900,
    "nested, closed": b'{"observation":' + b"[" * 900 + b"]" * 900 + b"}",
    "many values": b'{"observation": [' + b"1," * 20_000 + b"1]}",
    "key twice": b'{"observation": {}, "observation": {}}',
    "inner key twice": b'{"observation": {"state": [1], "state": [2]}}',
    "unfinished": b'{"observation": {"state": [1, 2',
    "half an escape": b'{"observation": "\\u12"}',
}  # fmt: skip
CASES |= {f"body: {name}": (lambda rng, raw=raw: post(raw)) for name, raw in RAW.items()}


@case
def truncated_json(rng):
    text = json.dumps(GOOD).encode()
    return post(text[: int(rng.integers(1, len(text) - 1))])


@case
def random_body(rng):
    return post(rng.bytes(int(rng.integers(1, 2000))))


@case
def too_large(rng):
    return post(b" " * (16 * 2**20 + int(rng.integers(1, 9))))


@case
def state_too_long(rng):
    return post(changed(("observation", "state"), [0.0] * int(rng.integers(5, 400))))


@case
def state_too_short(rng):
    return post(changed(("observation", "state"), [0.0] * int(rng.integers(0, 4))))


@case
def state_text_of_other_length(rng):
    return post(changed(("observation", "state"), json.dumps([1.0] * int(rng.integers(5, 9)))))


@case
def state_text_with_nan(rng):
    return post(changed(("observation", "state"), "[0, NaN, 0, 1]"))


@case
def state_text_that_is_not_json(rng):
    return post(changed(("observation", "state"), "0.1 0.2 0.3 1"))


@case
def state_of_two_rows(rng):
    return post(changed(("observation", "state"), [list(STATE), list(STATE)]))


@case
def state_beyond_any_unit(rng):
    value = float(10.0 ** rng.integers(7, 300)) * (-1) ** int(rng.integers(2))
    index = int(rng.integers(4))
    return post(changed(("observation", "state"), [value if i == index else 0.1 for i in range(4)]))


def unknown(path):
    def make(rng):
        name = "".join(map(chr, rng.integers(33, 0x3000, int(rng.integers(1, 60)))))
        return post(changed((*path, name), 1))

    return make


CASES["unknown field at the top"] = unknown(())
CASES["unknown field in observation"] = unknown(("observation",))
CASES["unknown field in sampling"] = unknown(("sampling",))

KEYS = {
    "from 0": ["0", "1"], "gap": ["1", "3"], "one": ["1"], "three": ["1", "2", "3"], "none": [],
    "names": ["Corner", "Gripper"], "padded": ["01", "02"], "negative": ["-1", "1"],
    "real": ["1.0", "2.0"], "other digits": ["١", "٢"],
}  # fmt: skip
for name, keys in KEYS.items():
    CASES[f"image keys: {name}"] = lambda rng, keys=keys: post(
        changed(("observation", "images"), dict.fromkeys(keys, b64(FIRST)))
    )


@case
def history_where_there_is_none(rng):
    return post(changed(("observation", "history_images"), [b64(FIRST)]))


@case
def other_number_of_steps(rng):
    return post(changed(("sampling", "num_steps"), int(rng.integers(4, 10**6))))


@case
def seed_out_of_range(rng):
    return post(changed(("sampling", "seed"), [-1, 2**64, 10**30][int(rng.integers(3))]))


@case
def unknown_robot(rng):
    return post(changed(("observation", "robot_type"), f"UR{int(rng.integers(10, 99))}"))


for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"):
    for path in ("/v1/infer", "/process_frame"):
        CASES[f"{method} {path}"] = lambda rng, m=method, p=path: (m, p, b"", [])

PATHS = (
    "/", "/v1", "/v1/", "/v1/infer/x", "/V1/INFER", "//v1/infer", "/process_frame/x",
    "/../etc/passwd", "/%2e%2e/", "/metadata/x", "/docs", "/static/../server.py", "/v2/infer",
    "/v1/infer\0", "/" + "a" * 3000, "/é",
)  # fmt: skip
for path in PATHS:
    CASES[f"path {path[:20]!r}"] = lambda rng, path=path: post(GOOD, path)
CASES["POST /metadata"] = lambda rng: post(b"{}", "/metadata")
CASES["POST /healthz"] = lambda rng: post(b"{}", "/healthz")

GOOD_FORM = [
    ("states", json.dumps(STATE)), ("text", "Reach"),
    ("image", "a.png", FIRST), ("image", "b.png", SECOND),
]  # fmt: skip


def form_case(fields):
    def make(rng):
        body, headers = form(fields)
        return post(body, "/process_frame", headers)

    return make


FORMS = {
    "no state": GOOD_FORM[1:],
    "no image": GOOD_FORM[:2],
    "one image": GOOD_FORM[:3],
    "three images": [*GOOD_FORM, ("image", "c.png", FIRST)],
    "nothing": [],
    "state as a file": [("states", "s.json", b"[1,2,3,4]"), *GOOD_FORM[1:]],
    "image as text": [*GOOD_FORM[:2], ("image", "x"), ("image", "y")],
    "two states": [GOOD_FORM[0], *GOOD_FORM],
    "two texts": [GOOD_FORM[1], *GOOD_FORM],
    "state is text": [("states", "abc"), *GOOD_FORM[1:]],
    "state is an object": [("states", "{}"), *GOOD_FORM[1:]],
    "state holds NaN": [("states", "[0, NaN, 0, 1]"), *GOOD_FORM[1:]],
    "state holds null": [("states", "[0, null, 0, 1]"), *GOOD_FORM[1:]],
    "state is short": [("states", "[0, 1]"), *GOOD_FORM[1:]],
    "deep state": [("states", "[" * 100_000), *GOOD_FORM[1:]],
    "long text": [("text", "a" * 200_000), GOOD_FORM[0], *GOOD_FORM[2:]],
    "control text": [("text", "a\0"), GOOD_FORM[0], *GOOD_FORM[2:]],
    "unknown robot": [*GOOD_FORM, ("robot_type", "UR99")],
    "long speed": [*GOOD_FORM, ("speed", "5" * 100)],
    "control mode with line break": [*GOOD_FORM, ("control_mode", "a\r\nb")],
    "history": [*GOOD_FORM, ("history_images", "h.png", FIRST)],
    "broken image": [*GOOD_FORM[:3], ("image", "b.png", b"x" * 100)],
    "empty image": [*GOOD_FORM[:3], ("image", "b.png", b"")],
    "bomb": [*GOOD_FORM[:3], ("image", "b.png", png_header(20_000, 20_000))],
    "10,000 fields": [(f"f{i}", "x") for i in range(10_000)],
    "500 files": [("image", f"{i}.png", b"") for i in range(500)],
}
CASES |= {f"form: {name}": form_case(fields) for name, fields in FORMS.items()}

FORM_BODY, FORM_HEADERS = form(GOOD_FORM)
KINDS = {
    "no type": [],
    "json type": [(b"content-type", b"application/json")],
    "url-encoded": [(b"content-type", b"application/x-www-form-urlencoded")],
    "no boundary": [(b"content-type", b"multipart/form-data")],
    "other boundary": [(b"content-type", b"multipart/form-data; boundary=other")],
    "empty boundary": [(b"content-type", b"multipart/form-data; boundary=")],
    "mixed": [(b"content-type", b"multipart/mixed; boundary=frontier")],
    "bytes": [(b"content-type", bytes(range(128, 160)))],
}
for name, headers in KINDS.items():
    CASES[f"form: {name}"] = lambda rng, h=headers: post(FORM_BODY, "/process_frame", h)


@case
def cut_form(rng):
    return post(FORM_BODY[: int(rng.integers(1, 200))], "/process_frame", FORM_HEADERS)


@case
def random_form(rng):
    return post(rng.bytes(500), "/process_frame", FORM_HEADERS)


@case
def form_head_without_end(rng):
    return post(b"--frontier\r\n" + b"a" * 100_000, "/process_frame", FORM_HEADERS)


LENGTHS = {
    "text": b"abc",
    "negative": b"-1",
    "huge": b"9" * 30,
    "real": b"1.5",
    "too large": b"16777217",
}
for name, length in LENGTHS.items():
    CASES[f"Content-Length: {name}"] = lambda rng, length=length: post(
        GOOD, headers=[(b"content-length", length)]
    )


def malformed(count, seed=0):
    """``count`` requests, class after class: (class, request)."""
    rng = np.random.default_rng(seed)
    names = sorted(CASES)
    for index in range(count):
        name = names[index % len(names)]
        yield name, CASES[name](rng)
