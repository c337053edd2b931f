"""A test that leaves a thread, a server or a child process behind fails, and the next test does not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import dedent

from conftest import run_module

CHILD = """
    import subprocess, sys, threading, socket
    import pytest
    from conftest import _nothing_is_left, seed_alone  # the fixture of all tests

    held, over = [], threading.Event()

    def test_thread():
        threading.Thread(target=over.wait, name="leaked", daemon=True).start()

    def test_server():
        held.append(socket.create_server(("127.0.0.1", 0)))

    def test_process():
        held.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    def test_generator_beside_a_thread():
        threading.Thread(target=over.wait, name="beside", daemon=True).start()
        seed_alone(1)

    def test_generator():
        seed_alone(1)

    def test_nothing():
        thread = threading.Thread(target=over.wait)
        thread.start()
        over.set()
        thread.join()
        with socket.create_server(("127.0.0.1", 0)):
            subprocess.run([sys.executable, "-c", ""], check=True)
        held[1].communicate()
        held[0].close()

    def test_ends_soon():
        threading.Timer(0.1, over.set).start()
"""


def test_what_a_test_leaves_fails_it(tmp_path: Path) -> None:
    child = tmp_path / "test_child.py"
    child.write_text(dedent(CHILD))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["VMMKV_LEFTOVERS_SECONDS"] = "0.3"
    output = run_module("pytest", "-q", "--rootdir", str(tmp_path), str(child), env=environment).stdout
    left = dict(re.findall(r"at teardown of test_(\w+) .*?\nE +Failed: left behind: (.*?)\n", output, re.DOTALL))
    assert left.keys() == {"thread", "server", "process", "generator_beside_a_thread"}, output
    assert left["thread"] == "thread leaked"
    assert re.fullmatch(r"socket at \('127.0.0.1', \d+\)", left["server"])
    assert re.fullmatch(r"process \d+ \(.*input\(\)\)", left["process"])
    assert "seeded while other threads run: ['beside']" in output
    assert re.search(r"^1 failed, 6 passed, .*4 errors", output, re.MULTILINE), output
