"""The command needs no network: it runs with every way there barred."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DATA

GUARD = """
import os, sys

BARRED = (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr",
    "socket.sendto", "socket.sendmsg", "urllib.Request", "http.client.connect",
)


def guard(event, arguments):
    if event.startswith(BARRED):
        # The process may swallow an exception; the file tells of the attempt in any case.
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(event + "\\n")
        raise RuntimeError("network use: " + event)


sys.addaudithook(guard)
open(os.environ["NETWORK_LOG"], "a").close()
"""


@pytest.fixture
def barred(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python refuses to open connections, and writes attempts down."""
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD)
    shutil.copyfile(DATA / "small_4x32_trained.torch", tmp_path / "m.torch")
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "guard"),
        "NETWORK_LOG": str(tmp_path / "network.log"),
    }


def isolated() -> list[str]:
    """A prefix that takes the network away, where the system lets us."""
    prefix = ["unshare", "-n"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        works = False
    return prefix if works else []


def test_the_guard_itself_works(barred, tmp_path: Path) -> None:
    for code in (
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')",
        "import socket; socket.getaddrinfo('example.org', 80)",
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], env=barred, capture_output=True, text=True
        )
        assert done.returncode != 0 and "network use" in done.stderr, done.stderr
    assert (tmp_path / "network.log").read_text()


def test_the_command_runs_without_a_network(barred, tmp_path: Path) -> None:
    """From start to end, report included."""
    log = tmp_path / "network.log"
    done = subprocess.run(
        [
            *isolated(),
            *(sys.executable, "-m", "cheri_export", "m.torch", "--length", "160", "--batch", "2"),
        ],
        env=barred,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert log.exists() and log.read_text() == "", "the guard was not loaded, or saw an attempt"
    assert json.loads((tmp_path / "m.cheri" / "report.json").read_text())["verdict"]["passed"]
