"""A real node for tests: `tidepool serve` in a process of its own."""

import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path


def stop(process: int) -> None:
    """Stops all threads of a process, and returns when they are."""
    os.kill(process, signal.SIGSTOP)
    tasks = Path(f"/proc/{process}/task")
    while not all(state(task) in "Tt" for task in tasks.iterdir()):
        pass


def state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "T"


def lasting_address() -> str:
    """A free address that stays free while a node is down.

    Port 0 would pick one of those that the system also gives to outgoing connections (ip(7), `ip_local_port_range`,
    from 32768 on): one that calls the dead node may get it.
    """
    for port in random.sample(range(10_000, 32_768), 100):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{port}"
    raise OSError("no free port")


class Node:
    """A node on ports of its own. Its data folder stays between :meth:`stop` and :meth:`start`."""

    def __init__(self, folder: Path, dram: str = "96MiB", nvme: str = "256MiB", more=()) -> None:
        self.folder = folder
        # The segment outlives its node, as it should: this goes with the test.
        self.segments = tempfile.TemporaryDirectory(prefix="tidepool-test-", dir="/dev/shm")
        memory = [f"dram.folder='{self.segments.name}'", f"dram.capacity={dram}"]
        self.settings = [*memory, f"nvme.capacity={nvme}", *more]
        self.grpc, self.admin = lasting_address(), lasting_address()
        self.process = None
        self.addresses = {}

    def start(self) -> "Node":
        """Starts it and waits until it is ready."""
        binary = os.environ["NODE_PROGRAM"]
        listen = [f"grpc.listen={self.grpc}", f"admin.listen={self.admin}", "engine.listen=127.0.0.1:0"]
        command = [binary, "serve", "--json", "--data", str(self.folder)]
        for setting in [*listen, *self.settings]:
            command += ["--set", setting]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        line = self.process.stdout.readline()
        assert line, f"the node did not start: {self.folder.with_suffix('.log').read_text()[-2000:]}"
        self.addresses = json.loads(line)
        self.wait_until_ready()
        return self

    def wait_until_ready(self, within: float = 60.0) -> None:
        until = time.monotonic() + within
        while True:
            try:
                with urllib.request.urlopen(f"http://{self.addresses['admin']}/readyz", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            assert time.monotonic() < until, "the node is not ready"
            assert self.process.poll() is None, "the node ended"
            time.sleep(0.05)

    @property
    def port(self) -> int:
        return int(self.grpc.rsplit(":", 1)[1])

    @property
    def socket(self) -> str:
        return f"unix:{self.addresses['unix']}"

    def make_tenant(self, name: str, **quota: object) -> None:
        """`bytes` and `objects`: what it may store."""
        body = json.dumps({"name": name, **quota}).encode()
        url, headers = f"http://{self.addresses['admin']}/v1/tenants/create", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            assert answer.status == 200

    def pause(self) -> None:
        stop(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()
