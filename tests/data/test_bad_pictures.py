"""Bad pictures: they end a run by name, or others are drawn in their place, the same in any run."""

import json
import pickle
import random

import lerobot_sets as sets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from robot_sets import write_robot_set
from torch.utils.data import DataLoader

from opendm.data.augmentations import TrainingTransformPipeline
from opendm.data.dataset import BAD_PICTURES, MAX_BAD_IN_A_ROW, JsonlDataset
from opendm.data.mixture import Mixture
from opendm.data.transforms import LoadHistory, LoadImages, Pipeline, PixelTransform
from opendm.errors import DataError, PictureError
from opendm.trainer.sampling import (
    SampleKey,
    SeededCollator,
    SeededDataset,
    StepSampler,
    sample_seed,
)

EPISODES, FRAMES = 3, 8
NUM_SAMPLES = EPISODES * FRAMES
BAD_ROWS = (0, 1, 5, 9, 10, 11, 17)
SEED, STEPS, BATCH = 4, 12, 8


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_robot_set(
        tmp_path_factory.mktemp("good"),
        num_images=2, state_dim=2, action_dim=2, num_episodes=EPISODES, num_frames=FRAMES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """The same set; some samples have a picture that is missing, empty, cut or none."""
    root = write_robot_set(
        tmp_path_factory.mktemp("spoiled"),
        num_images=2, state_dim=2, action_dim=2, num_episodes=EPISODES, num_frames=FRAMES,
    )  # fmt: skip
    for number, row in enumerate(BAD_ROWS):
        path = root / f"images/{row // FRAMES}/{1 + number % 2}/{row % FRAMES}.jpg"
        content = path.read_bytes()
        if number % 4 == 0:
            path.unlink()
        else:
            path.write_bytes([b"", b"", content[:200], b"no picture"][number % 4])
    return root


class Named:
    """Reads the pictures of a sample and keeps its place and a random number."""

    def __init__(self, root):
        self.load = LoadImages(["images_1", "images_2"], str(root))

    def __call__(self, sample):
        self.load(sample)
        meta = sample["meta_data"]
        episode = int(meta["episode_path"][-7])
        return {"row": episode * FRAMES + meta["frame_index"], "noise": torch.rand(1).item()}


def dataset(root, *, skips=True, transforms=None):
    transforms = Named(root) if transforms is None else transforms
    return JsonlDataset(str(root), transforms, "a_set", replaces_bad_pictures=skips)


def rows_and_keys(samples):
    return {"rows": [sample["row"] for sample in samples], "keys": [set(s) for s in samples]}


def batches(data, workers=0, *, rank=0, world_size=1, first_step=0, **options):
    """This rank's batches, loaded as the trainer loads them."""
    sampler = StepSampler(
        len(data), SEED, STEPS, BATCH // world_size, rank=rank, world_size=world_size,
        first_step=first_step, first_sample=first_step * BATCH, **options,
    )  # fmt: skip
    return list(
        DataLoader(
            SeededDataset(data, SEED),
            batch_sampler=sampler,
            collate_fn=SeededCollator(rows_and_keys),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
    )


def expected_rows(first_step=0):
    """Drawn one by one with generators of their own."""
    rows, tried = [], []
    for step in range(first_step, STEPS):
        sampler = StepSampler(NUM_SAMPLES, SEED, STEPS, BATCH)
        for key in sampler.step_keys(step)[0]:
            draws, row = random.Random(f"{sample_seed(SEED, key)}/{key.row}"), key.row
            while row in BAD_ROWS:
                tried.append(row)
                row = draws.randrange(NUM_SAMPLES)
            rows.append(row)
    return rows, tried


def drawn(found):
    return [row for batch in found for row in batch["rows"]]


def replaced(found):
    return [draw for batch in found for draw in batch.get(BAD_PICTURES, [])]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_replacements_depend_on_seed_pass_and_sample_alone(spoiled, workers):
    found = batches(dataset(spoiled), workers)
    rows, tried = expected_rows()
    assert drawn(found) == rows
    assert len([file for draw in replaced(found) for file, _ in draw]) == len(tried)
    assert drawn(batches(dataset(spoiled), workers, first_step=5)) == rows[5 * BATCH :]


def test_two_ranks_draw_what_one_draws(spoiled):
    ranks = [batches(dataset(spoiled), rank=rank, world_size=2) for rank in range(2)]
    together = [
        row for pair in zip(*map(drawn, ranks), strict=True) for row in pair
    ]  # rank r has every second row of a step
    assert together == expected_rows()[0]
    alone = batches(dataset(spoiled))
    assert sum(len(replaced(found)) for found in ranks) == len(replaced(alone))


def test_every_replaced_draw_is_reported_once_with_its_files(spoiled):
    found = batches(dataset(spoiled), 2)
    keys = [
        key
        for step in range(STEPS)
        for key in StepSampler(NUM_SAMPLES, SEED, STEPS, BATCH).step_keys(step)[0]
    ]
    draws = replaced(found)
    assert len(draws) == sum(key.row in BAD_ROWS for key in keys) > 20
    assert len({file for draw in draws for file, _ in draw}) == len(BAD_ROWS)
    assert all(names == {"row", "noise"} for batch in found for names in batch["keys"])


def test_another_pass_draws_another_replacement(spoiled):
    data = SeededDataset(dataset(spoiled), SEED)
    assert len({data[SampleKey(epoch, 0)][0]["row"] for epoch in range(8)}) > 3


def test_good_pictures_cost_no_draw_and_change_no_batch(good):
    def transforms():
        return Pipeline([
            LoadImages(["images_1", "images_2"], str(good)),
            PixelTransform(TrainingTransformPipeline(32)),
        ])  # fmt: skip

    strict, skipping = (
        SeededDataset(dataset(good, skips=skips, transforms=transforms()), SEED)
        for skips in (False, True)
    )
    for row in range(NUM_SAMPLES):
        (one, _), (other, _) = strict[SampleKey(0, row)], skipping[SampleKey(0, row)]
        assert one.keys() == other.keys()
        for image, same in zip(one["images"], other["images"], strict=True):
            np.testing.assert_array_equal(np.asarray(image), np.asarray(same))
    assert drawn(batches(dataset(good))) == drawn(batches(dataset(good, skips=False)))
    assert all(BAD_PICTURES not in batch for batch in batches(dataset(good)))


def test_strict_mode_ends_with_place_file_reason_and_advice(spoiled):
    found = batches(dataset(spoiled, skips=False), 1)
    [error] = {str(batch) for batch in found if isinstance(batch, PictureError) and
               "/images/0/1/0.jpg" in str(batch)}  # fmt: skip
    assert error.startswith(f"{spoiled}/episode_0.jsonl:1: image file {spoiled}/images/0/1/0.jpg")
    assert "does not exist" in error
    assert "opendm check" in error
    assert "--data-config.bad-records skip" in error


def test_the_error_comes_through_a_pipe_with_its_file(spoiled):
    with pytest.raises(PictureError) as caught:
        dataset(spoiled, skips=False)[0]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.file) == (str(caught.value), f"{spoiled}/images/0/1/0.jpg")


def test_a_set_of_bad_pictures_alone_ends_with_an_error_and_not_in_a_loop(tmp_path):
    root = write_robot_set(tmp_path, num_images=2, state_dim=2, action_dim=2)
    for path in root.glob("images/*/2/*.jpg"):
        path.write_bytes(b"")
    tries = []
    named = Named(root)
    data = dataset(root, transforms=lambda sample: (tries.append(1), named(sample)))
    with pytest.raises(DataError, match=f"'a_set': {MAX_BAD_IN_A_ROW} samples in a row.*/2/"):
        data[3]
    assert len(tries) == MAX_BAD_IN_A_ROW


def test_a_replacement_comes_from_the_same_dataset_of_a_mixture(good, spoiled):
    mixed = Mixture(
        [dataset(good), dataset(spoiled)],
        [np.arange(NUM_SAMPLES), np.arange(NUM_SAMPLES, 2 * NUM_SAMPLES)],
        [1, 1],
    )
    for row in BAD_ROWS:
        sample = mixed[NUM_SAMPLES + row]
        assert sample["row"] not in BAD_ROWS
        assert str(spoiled) in sample[BAD_PICTURES][0][0]


def test_all_views_and_history_frames_count(spoiled):
    """Frames 2 to 4 of the first episode see the bad frame 1 of its second camera one step back."""
    history = LoadHistory("images_2", str(spoiled), 1, uniform_fps=1.0)

    def transforms(sample):
        sample["meta_data"]["fps"] = 1
        return history(sample)

    data = dataset(spoiled, transforms=transforms)
    assert data[2][BAD_PICTURES][0][0] == f"{spoiled}/images/0/2/1.jpg"
    assert "history frame 1" in data[2][BAD_PICTURES][0][1]
    assert BAD_PICTURES not in data[4]


def one_frame(root, picture):
    record = {"state": [0.0], "action": [0.0], "prompt": "go"}
    lines = [{**record, "images_1": picture}, {**record, "images_1": {"url": "good.png"}}]
    (root / "e.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    load = LoadImages(["images_1"], str(root))
    return JsonlDataset(str(root), load, replaces_bad_pictures=True)


@pytest.fixture
def kinds(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    good_png = sets._png(pixels)
    (tmp_path / "good.png").write_bytes(good_png)
    (tmp_path / "folder.png").mkdir()
    sets.write_video(tmp_path / "a.mp4", [pixels] * 3)
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "a.mp4").read_bytes()[:300])
    cell = pa.table({"camera": [{"bytes": good_png[:60], "path": None}]})
    sets.write_parquet(tmp_path / "a.parquet", cell)
    Image.new("1", (8000, 8000)).save(tmp_path / "large.png")
    return tmp_path


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("picture", "reason"), [
    ({"url": "gone.png"}, "does not exist"),
    ({"url": f"{'long' * 100}.png"}, "cannot be read"),
    ({"url": "folder.png"}, "does not exist"),
    ({"url": "large.png"}, "pixels"),
    ({"type": "video", "url": "a.mp4", "frame_idx": 3}, "no frame 3"),
    ({"type": "video", "url": "cut.mp4", "frame_idx": 0}, "cannot be opened"),
    ({"type": "parquet", "url": "a.parquet", "row": 0, "column": "camera"}, "cannot be decoded"),
    ({"type": "parquet", "url": "a.parquet", "row": 1, "column": "camera"}, "has no row 1"),
])  # fmt: skip
def test_files_of_all_kinds_are_replaced(kinds, picture, reason):
    sample = one_frame(kinds, picture)[0]
    assert sample["images_1"] == {"url": "good.png"}
    assert all(reason in error for _, error in sample[BAD_PICTURES])


@pytest.mark.parametrize("picture", [
    {"url": "../good.png"}, {"url": "http://host/a.png"}, {"type": "gif", "url": "good.png"},
    {"url": 3},
    {"type": "video", "url": "a.mp4", "frame_idx": 0.5}, {"type": "video", "url": "a.mp4"}, "a.png",
])  # fmt: skip
def test_records_that_are_wrong_and_paths_that_leave_the_folder_still_end_the_run(kinds, picture):
    data = one_frame(kinds, picture)
    with pytest.raises(DataError, match=r"e\.jsonl:1"):
        data[0]
