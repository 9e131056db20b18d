"""Tidepool beside the reference (Mooncake's wheel from PyPI), on loopback, in one run, through the same Python calls.

    scripts/bench-reference [--list] [--quick] [--json] [ROW..]

Both sides have their object in another process on this host, or in their own where the row says "in one process". They take turns: ours,
theirs, ours, theirs. A row is the median of the ratios of neighbours. Started by the script, which makes both environments.
"""

import argparse
import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, Optional

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SEGMENT = 3 * GIB
WORKING_SET = GIB
THREADS = 4
HERE = Path(__file__).parent
TICK = os.sysconf("SC_CLK_TCK")


class Row(NamedTuple):
    """What is compared. A `write` fills what a `read` then reads; one of both is the row's own figure."""

    name: str
    target: float
    side: str
    op: str
    size: int
    batch: int = 0
    threads: int = 1
    unregistered: bool = False
    # Else throughput: then a ratio of 2 means twice as fast. A latency's ratio is ours over theirs.
    latency: bool = False


def rows():
    for name, size, batch in (("1 MiB", MIB, 32), ("4 MiB", 4 * MIB, 8)):
        for threads, get, put, other in ((1, 5, 4, 3), (THREADS, 10, 8, 6)):
            what = f"{name}, {threads} threads" if threads > 1 else name
            yield Row(f"get {what}, shared memory", get, "shm", "batch_get_into", size, batch, threads)
            yield Row(f"put {what}, shared memory", put, "shm", "batch_put_from", size, batch, threads)
            yield Row(f"put {what}, other memory", other, "shm", "batch_put_from", size, batch, threads, True)
        for threads, get, put in ((1, 1.5 if size == MIB else 1.4, 1.4), (THREADS, 3.5, 3)):
            what = f"{name}, {threads} threads" if threads > 1 else name
            yield Row(f"get {what}, tcp", get, "tcp", "batch_get_into", size, batch, threads)
            yield Row(f"put {what}, tcp", put, "tcp", "batch_put_from", size, batch, threads)
    for batch in (128, 1000):
        for threads in (1, 4):
            name = f"exists of {batch}, {threads} thread{'s' * (threads > 1)}"
            yield Row(name, 1.5, "shm", "batch_is_exist", 64, batch, threads)
    for name, size, batch in (("1 MiB", MIB, 0), ("4 MiB", 4 * MIB, 0), ("32 x 1 MiB", MIB, 32)):
        batched = "batch_" if batch else ""
        yield Row(f"get {name}, in one process", 1, "own", f"{batched}get_into", size, batch)
        yield Row(f"put {name}, in one process", 1, "own", f"{batched}put_from", size, batch)
    yield Row("get 4 KiB, in one process, p50", 1, "own", "get", 4 * KIB, latency=True)
    yield Row("get 4 KiB, p50", 1 / 30, "shm", "get", 4 * KIB, latency=True)
    yield Row("get 4 KiB, p50, by messages", 0.25, "messages", "get", 4 * KIB, latency=True)
    yield Row("put 4 KiB, p50, durability os", 0.5, "os", "put", 4 * KIB, latency=True)
    yield Row("put 4 KiB, p50, durability fsync", 0, "shm", "put", 4 * KIB, latency=True)


WRITE_OF = {
    "batch_get_into": "batch_put_from",
    "get_into": "put_from",
    "batch_is_exist": "batch_put_from",
    "get": "put",
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Refused(Exception):
    """A side did not take what a row is to write or read: the row can't be measured."""


class Side:
    """Processes of one side: those that keep, and one that calls."""

    def __init__(self, python, arguments, folder, name, keepers, environment):
        self.name, self.processes = name, list(keepers)
        self.log = open(folder / f"{name}.log", "ab")
        self.load = start_load(python, {"arguments": arguments, "threads": THREADS}, self.log, environment)
        self.processes.append(self.load)

    def ask(self, **command):
        self.load.stdin.write(json.dumps(command) + "\n")
        self.load.stdin.flush()
        line = self.load.stdout.readline()
        if not line:
            sys.exit(f"the load ended; see {self.log.name}: {Path(self.log.name).read_text()[-2000:]}")
        return json.loads(line)

    def cpu(self):
        def of(process):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / TICK

        return sum(map(of, self.processes))

    def measure(self, row, tag, seconds):
        """The row's figure, once: throughput or microseconds, and CPU seconds of all its processes a GB."""
        count = max(1, row.batch)
        calls = max(2, min(WORKING_SET // (row.size * count * row.threads), 4000 // count))
        same = {"size": row.size, "batch": row.batch, "threads": row.threads, "tag": tag, "calls": calls}
        write = WRITE_OF.get(row.op)
        if write:
            wrote = self.ask(op=write, seconds=60.0, **same)
            if wrote["failed"]:
                self.ask(op="clear")
                raise Refused(f"{self.name} refused {wrote['failed']} of {wrote['calls'] * row.threads} calls that write")
        before = self.cpu()
        got = self.ask(op=row.op, seconds=seconds, unregistered=row.unregistered, **same)
        cpu = (self.cpu() - before) / max(got["bytes"], 1) * 1e9
        self.ask(op="clear")
        if got["failed"]:
            raise Refused(f"{self.name} refused {got['failed']} of {got['calls'] * row.threads} calls")
        assert got["right"], f"{row.name}: {got}"
        figure = got["p50_us"] if row.latency else got["keys_per_second"] * (row.size if "get_into" in row.op or "put" in row.op else 1)
        return figure, cpu


def start_load(python, setup, log, environment):
    command = [str(python), str(HERE / "load.py"), json.dumps(setup)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)
    if process.stdout.readline() != "ready\n":
        sys.exit(f"a process did not start; see {log.name}: {Path(log.name).read_text()[-2000:]}")
    return process


def reference(python, folder, name="reference", is_lender=False):
    """Its master, a process that lends a segment, and one that has none and calls; or one that does both."""
    where = subprocess.check_output([str(python), "-c", "import mooncake; print(mooncake.__path__[0])"], text=True)
    port, log = free_port(), open(folder / f"{name}.log", "ab")
    flags = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
    master = subprocess.Popen([f"{where.strip()}/mooncake_master", *flags, "--rpc_thread_num=4"], stdout=log, stderr=log)
    wait_for(port, master, log)
    environment = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "GLOG_minloglevel": "2"}
    arguments = ["127.0.0.1", "P2PHANDSHAKE", SEGMENT, 64 * MIB, "tcp", "", f"127.0.0.1:{port}"]
    keepers = [master]
    if not is_lender:
        keepers.append(start_load(python, {"arguments": arguments, "threads": 0}, log, environment))
        arguments = [*arguments[:2], 0, 512 * MIB, *arguments[4:]]
    return touched(Side(python, arguments, folder, name, keepers, environment))


def touched(side):
    """Its segment's memory is the system's to give until something is put there: no row pays for that."""
    side.ask(op="fill", bytes=SEGMENT * 85 // 100)
    side.ask(op="clear")
    return side


def wait_for(port, process, log):
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None:
            sys.exit(f"{process.args[0]} ended; see {log.name}: {Path(log.name).read_text()[-2000:]}")


def node(folder, name, dram, *settings):
    """A node of ours with as much memory. Its address, when its memory is mapped."""
    listen = ["grpc.listen=127.0.0.1:0", "admin.listen=127.0.0.1:0", "engine.listen=127.0.0.1:0"]
    command = [os.environ["NODE_PROGRAM"], "serve", "--json", "--data", str(folder / name), "--dram", str(dram), "--nvme", "0"]
    for setting in [*listen, f"dram.folder={folder}/segments", *settings]:
        command += ["--set", setting]
    log = open(folder / f"{name}.log", "ab")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline()
    if not line:
        sys.exit(f"the node did not start; see {log.name}: {Path(log.name).read_text()[-2000:]}")
    return process, json.loads(line)["grpc"]


def ours(python, folder, name, keeper, address, environment, segment=0):
    arguments = ["127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", address]
    return Side(python, arguments, folder, name, [keeper], environment)


def quartiles(values):
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def figure_of(row, pairs):
    ratios = [own[0] / other[0] for own, other in pairs]
    low, median, high = quartiles(ratios)
    met: Optional[bool] = None
    if row.target:
        met = median <= row.target if row.latency else median >= row.target and low >= 0.9 * row.target
    return {
        "name": row.name,
        "target": row.target or None,
        "ratio": median,
        "quartiles": [low, high],
        "met": met,
        "ours": statistics.median(own[0] for own, _ in pairs),
        "theirs": statistics.median(other[0] for _, other in pairs),
        "cpu_seconds_per_gb": [statistics.median(side[1] for side in sides) for sides in zip(*pairs)],
    }


def text_of(row, figure):
    def one(value):
        if row.latency:
            return f"{value:.1f} us"
        return f"{value / 1e6:.2f} M/s" if "exist" in row.op else f"{value / 1e9:.2f} GB/s"

    low, high = figure["quartiles"]
    verdict = {True: "met", False: "MISSED", None: ""}[figure["met"]]
    cpu = "" if row.latency or "exist" in row.op else "  CPU {:.2f} beside {:.2f} s/GB".format(*figure["cpu_seconds_per_gb"])
    least = f"{'<=' if row.latency else '>='} {row.target:.3g}" if row.target else ""
    ratio = f"{figure['ratio']:.3g} [{low:.3g}, {high:.3g}]"
    return f"{row.name:<36}{least:>8}  {ratio:<22}{verdict:<8}{one(figure['ours'])} beside {one(figure['theirs'])}{cpu}"


def memcpy_rate(seconds):
    """Bytes a second that one thread copies, 1 MiB at a time between memories that no cache holds: what no copy goes beyond."""
    source, target = (mmap.mmap(-1, WORKING_SET // 2) for _ in range(2))
    start, end = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (source, target))
    for memory in (start, end):
        ctypes.memset(memory, 1, WORKING_SET // 2)
    copied, began = 0, time.monotonic()
    while (took := time.monotonic() - began) < seconds:
        at = copied % (WORKING_SET // 2)
        ctypes.memmove(end + at, start + at, MIB)
        copied += MIB
    return copied / took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="parts of names of rows; none: all")
    parser.add_argument("--list", action="store_true", help="only say which rows there are")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns: shows that it works, proves nothing")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    wanted = parser.parse_args()
    chosen = [row for row in rows() if not wanted.rows or any(part in row.name for part in wanted.rows)]
    if wanted.list:
        print("\n".join(row.name for row in chosen))
        return 0
    turns, seconds = (2, 0.3) if wanted.quick else (5, 1.0)
    own, other = os.environ["OUR_PYTHON"], os.environ["REFERENCE_PYTHON"]
    missed = 0
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as segments:
        folder, sides = Path(scratch), {}
        # Its memory on a tmpfs, its log on a disk.
        (folder / "segments").symlink_to(segments)
        try:
            apart = {row.side for row in chosen} - {"own"}
            if apart:
                keeper, address = node(folder, "node", SEGMENT)
                sides["reference"] = reference(other, folder)
                sides["shm"] = touched(ours(own, folder, "shm", keeper, address, {}))
                sides["tcp"] = ours(own, folder, "tcp", keeper, address, {"TIDEPOOL_SAME_HOST": "0"})
                sides["messages"] = ours(own, folder, "messages", keeper, address, {"TIDEPOOL_LOCAL_READS": "0"})
            if "os" in apart:
                sides["os"] = ours(own, folder, "os", *node(folder, "os", 256 * MIB, "catalog.durability=os"), {})
            if any(row.side == "own" for row in chosen):
                lends = {"TIDEPOOL_LEND_SEGMENT": "1"}
                keeper, address = node(folder, "master", 256 * MIB)
                sides["own"] = touched(ours(own, folder, "own", keeper, address, lends, SEGMENT))
                sides["reference-own"] = reference(other, folder, "reference-own", is_lender=True)
            copied = memcpy_rate(seconds)
            line = {"name": "memcpy of 1 MiB, cold, one thread", "ours": copied}
            print(json.dumps(line) if wanted.json else f"{line['name']}: {copied / 1e9:.2f} GB/s", flush=True)
            for row in chosen:
                beside = "reference-own" if row.side == "own" else "reference"
                try:
                    pairs = [
                        tuple(sides[side].measure(row, f"{row.name}/{turn}", seconds) for side in (row.side, beside))
                        for turn in range(turns)
                    ]
                except Refused as refused:
                    why = {"name": row.name, "not_measured": str(refused)}
                    print(json.dumps(why) if wanted.json else f"{row.name:<36}not measured: {refused}", flush=True)
                    missed += 1
                    continue
                figure = figure_of(row, pairs)
                missed += figure["met"] is False
                print(json.dumps(figure) if wanted.json else text_of(row, figure), flush=True)
        finally:
            for process in {process for side in sides.values() for process in side.processes}:
                process.kill()
                process.wait()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
