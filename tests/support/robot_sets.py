"""Small JSONL sets of any robot's shape, with noise for pictures."""

import json

import numpy as np
from PIL import Image


def write_robot_set(folder, *, num_images, state_dim, action_dim, num_episodes=2, num_frames=8):
    """``images_1`` .. and vectors of the given sizes, below ``folder``."""
    rng = np.random.default_rng(0)
    for episode in range(num_episodes):
        lines = []
        for frame in range(num_frames):
            record = {"state": rng.normal(size=state_dim).tolist(), "prompt": "pick up the cube"}
            if action_dim:
                record["action"] = rng.normal(size=action_dim).tolist()
            for camera in range(1, num_images + 1):
                url = f"images/{episode}/{camera}/{frame}.jpg"
                path = folder / url
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
                record[f"images_{camera}"] = {"type": "image", "url": url}
            lines.append(json.dumps(record))
        (folder / f"episode_{episode}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
