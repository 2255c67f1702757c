"""The soak: its verdict on given readings, and the hour itself."""

import subprocess
import sys
from pathlib import Path

import pytest
from service_soak import MAX_GROWTH, Clients, growth

HOUR_S = 3600


@pytest.mark.parametrize("held", [0.0, 30.0])
def test_the_line_shows_what_grows_and_not_what_was_there_at_first(held):
    """The first quarter may warm up; what is held afterwards rises evenly."""
    readings = [(at, 800 + 50 * (at < 900) + held * at / HOUR_S) for at in range(0, HOUR_S, 15)]
    assert growth(readings) == pytest.approx(0.75 * held, abs=0.2)
    assert (growth(readings) > MAX_GROWTH["resident MB"]) == (held > 0)


def test_a_reply_that_differs_in_one_bit_is_wrong(monkeypatch):
    clients = Clients(0, quiet={0: [[0.5]]})
    for content, num_wrong in ((b'{"actions": [[0.5]]}', 0), (b'{"actions": [[0.50000006]]}', 1)):
        monkeypatch.setattr(
            Clients, "infer", lambda *_, content=content: (b"HTTP/1.1 200 OK", content)
        )
        clients.ask(0)
        assert len(clients.wrong) == num_wrong


@pytest.mark.soak
def test_an_hour_of_mixed_load_leaves_memory_descriptors_and_replies_as_they_were(
    served_checkpoint, tmp_path
):
    script = Path(__file__).with_name("service_soak.py")
    command = [sys.executable, script, "--checkpoint", served_checkpoint]
    words = ["--seconds", str(HOUR_S), "--load", "1.0", "--log", tmp_path / "log"]
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=2 * HOUR_S, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
