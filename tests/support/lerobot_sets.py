"""One small data set, written as JSONL and by the documented LeRobot layouts."""

import io
import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

LENGTHS = (5, 4, 6)
TASKS = ("pick up the cup", "open the drawer")
STATE_NAMES = ["waist", "shoulder", "elbow", "gripper"]
SIZES = {"top": (48, 32), "left_wrist": (32, 48)}
FPS = 10


@dataclass
class SmallSet:
    """Episodes of frames; pictures are ``[N, height, width, 3]`` per camera."""

    lengths: tuple[int, ...] = LENGTHS
    seed: int = 0
    fps: float = FPS
    cameras: dict = field(default_factory=lambda: dict(SIZES))

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        # multiples of 1/64 are the same numbers in float32, float64 and JSON
        self.state, self.action = (
            [rng.integers(-640, 640, (n, 4)) / 64 for n in self.lengths] for _ in range(2)
        )
        self.task = [[(e + t // 3) % 2 for t in range(n)] for e, n in enumerate(self.lengths)]
        self.pictures = {
            name: [_pictures(rng, n, *size) for n in self.lengths]
            for name, size in self.cameras.items()
        }


def _pictures(rng, count, width, height):
    """Smooth in space and different in time."""
    small = rng.integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return [np.asarray(Image.fromarray(p).resize((width, height), Image.Resampling.BILINEAR))
            for p in small]  # fmt: skip


def write_video(path, pictures, fps=FPS, *, codec="libx264", options=None, stamps=None,
                time_base=None):  # fmt: skip
    """Without loss unless ``options`` say otherwise; ``stamps`` are in ``time_base``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lossless = codec == "libx264" and options is None
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {"qp": "0", "g": "3"})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv444p" if lossless else "yuv420p"
        if time_base:
            stream.time_base = stream.codec_context.time_base = time_base
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = stamps[number] if stamps else number
            frame.time_base = time_base or 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def decode_all(path):
    """Every frame in the order of showing, by decoding the file from its start."""
    with av.open(str(path)) as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(video=0)]


def write_jsonl(root, data):
    """One JSONL file and one video per camera for each episode."""
    for e, length in enumerate(data.lengths):
        for name, episodes in data.pictures.items():
            write_video(root / "videos" / name / f"{e}.mp4", episodes[e], data.fps)
        lines = [
            json.dumps({
                **{f"observation.images.{name}": {"type": "video", "url": f"videos/{name}/{e}.mp4",
                                                  "frame_idx": t} for name in data.cameras},
                "state": data.state[e][t].tolist(),
                "action": data.action[e][t].tolist(),
                "prompt": TASKS[data.task[e][t]],
            })
            for t in range(length)
        ]  # fmt: skip
        (root / f"episode_{e:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def _feature(dtype, shape, names=None):
    return {"dtype": dtype, "shape": list(shape), "names": names}


def _info(data, version, camera_dtype):
    cameras = {
        f"observation.images.{name}": _feature(
            camera_dtype, (height, width, 3), ["height", "width", "channels"]
        )
        for name, (width, height) in data.cameras.items()
    }
    places = ("frame_index", "episode_index", "index", "task_index")
    info = {
        "codebase_version": version,
        "robot_type": "so101",
        "fps": data.fps,
        "chunks_size": 1000,
        "features": {
            "observation.state": _feature("float32", (4,), STATE_NAMES),
            "action": _feature("float32", (4,), {"motors": STATE_NAMES}),
            **cameras,
            "timestamp": _feature("float32", (1,)),
            **{name: _feature("int64", (1,)) for name in places},
        },
        "total_episodes": len(data.lengths),
        "total_frames": sum(data.lengths),
        "total_tasks": len(TASKS),
    }
    if version == "v3.0":
        info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    else:
        info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        info["video_path"] = (
            "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        )
    return info


def _png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def episode_table(data, e, pictures=None):
    """The parquet rows of one episode; ``pictures`` go into columns."""
    first = sum(data.lengths[:e])
    frame = np.arange(data.lengths[e])
    vectors = pa.list_(pa.float32(), 4)
    columns = {
        "observation.state": pa.array(data.state[e].tolist(), vectors),
        "action": pa.array(data.action[e].tolist(), vectors),
        "timestamp": pa.array(frame / data.fps, pa.float32()),
        "frame_index": pa.array(frame, pa.int64()),
        "episode_index": pa.array(np.full(len(frame), e), pa.int64()),
        "index": pa.array(first + frame, pa.int64()),
        "task_index": pa.array(data.task[e], pa.int64()),
    }
    for name, episodes in (pictures or {}).items():
        cells = [{"bytes": _png(p), "path": f"frame-{t:06d}.png"}
                 for t, p in enumerate(episodes[e])]  # fmt: skip
        columns[f"observation.images.{name}"] = pa.array(
            cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        )
    return pa.table(columns)


def write_parquet(path, table, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, **options)


def _write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_v2(root, data, version="v2.1"):
    """One parquet file and one video per camera for each episode."""
    meta = root / "meta"
    meta.mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps(_info(data, version, "video")))
    tasks = [{"task_index": i, "task": text} for i, text in enumerate(TASKS)]
    _write_lines(meta / "tasks.jsonl", tasks[::-1])
    episodes = [{"episode_index": e, "tasks": [], "length": n} for e, n in enumerate(data.lengths)]
    _write_lines(meta / "episodes.jsonl", episodes[::-1])
    for e in range(len(data.lengths)):
        write_parquet(root / f"data/chunk-000/episode_{e:06d}.parquet", episode_table(data, e))
        for name, pictures in data.pictures.items():
            key = f"observation.images.{name}"
            write_video(root / f"videos/chunk-000/{key}/episode_{e:06d}.mp4", pictures[e], data.fps)
    return root


def write_v3(root, data, *, pictures=None, timestamps=None):
    """All episodes in one file per kind; ``pictures`` per camera go into the parquet file."""
    dtype = "image" if pictures else "video"
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(_info(data, "v3.0", dtype)))
    order = list(range(len(TASKS)))[::-1]
    tasks = {"task_index": order, "task": [TASKS[i] for i in order]}
    write_parquet(root / "meta" / "tasks.parquet", pa.table(tasks))
    starts = np.concatenate([[0], np.cumsum(data.lengths)])
    times = starts / data.fps if timestamps is None else timestamps
    count = len(data.lengths)
    columns = {
        "episode_index": np.arange(count),
        "length": np.array(data.lengths),
        "data/chunk_index": np.zeros(count, np.int64),
        "data/file_index": np.zeros(count, np.int64),
        "dataset_from_index": starts[:-1],
        "dataset_to_index": starts[1:],
    }
    for name in () if pictures else data.cameras:
        place = f"videos/observation.images.{name}"
        columns[f"{place}/chunk_index"] = columns[f"{place}/file_index"] = np.zeros(count, np.int64)
        columns[f"{place}/from_timestamp"] = times[:-1]
        columns[f"{place}/to_timestamp"] = times[1:]
        joined = [picture for episode in data.pictures[name] for picture in episode]
        write_video(root / "videos" / f"observation.images.{name}" / "chunk-000" / "file-000.mp4",
                    joined, data.fps)  # fmt: skip
    write_parquet(root / "meta/episodes/chunk-000/file-000.parquet", pa.table(columns))
    rows = pa.concat_tables([episode_table(data, e, pictures) for e in range(count)])
    write_parquet(root / "data/chunk-000/file-000.parquet", rows, row_group_size=4)
    return root


def decoded_pictures(root: Path, data: SmallSet):
    """What the videos of :func:`write_jsonl` show, as pictures for :func:`write_v3`."""
    return {
        name: [decode_all(root / "videos" / name / f"{e}.mp4") for e in range(len(data.lengths))]
        for name in data.cameras
    }
