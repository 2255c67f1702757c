"""Commands that open a dataset follow links out of its folders only if they are told to."""

import pytest
from robot_sets import write_robot_set

from opendm.cli import main
from opendm.model.dm05 import tiny


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A set whose second episode and first picture are links to files elsewhere."""
    monkeypatch.setenv("OPENDM_CACHE", str(tmp_path / "cache"))
    root = write_robot_set(tmp_path / "set", num_images=1, state_dim=2, action_dim=2)
    for name in ("episode_1.jsonl", "images/0/1/0.jpg"):
        elsewhere = (root / name).rename(tmp_path / f"elsewhere-{(root / name).name}")
        (root / name).symlink_to(elsewhere)
    return root


def test_data_view(folder, tmp_path, capsys):
    command = ["data", "view", str(folder), "--output", str(tmp_path / "page.html")]
    assert main([*command, "--chunk-size", "4"]) == 3
    assert "--data-config.allow-outside-root" in capsys.readouterr().err
    assert main([*command, "--chunk-size", "4", "--allow-outside-root"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "leaves the folder" not in page
    assert page.count("<img") > 4


def test_tiny_checkpoint(folder, tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(tiny, "build_tiny_checkpoint", lambda *args, **options: made.append(args))
    command = ["tiny-checkpoint", "--dataset-name", str(folder), "--output", str(tmp_path / "tiny")]
    assert main(command) == 3
    assert "leaves the folder" in capsys.readouterr().err
    assert main([*command, "--allow-outside-root"]) == 0
    assert made == [(tmp_path / "tiny", ["pick up the cube"])]
