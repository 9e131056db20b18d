"""Calls leave no memory behind: the short form of `make bench-python`, whose long one makes ten million."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "bench" / "soak.py"


@pytest.mark.parametrize("way", ["socket", "grpc"])
def test_calls_leave_no_memory_behind(node, way):
    command = [sys.executable, SOAK, getattr(node, way), "--operations", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
