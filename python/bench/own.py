"""What the Python package costs, beside the Rust client and by itself, in one run.

    scripts/bench-python [--quick] [--json] [import|overhead|soak ..]

`import`: how long `import tidepool` takes in a new interpreter. `overhead`: gets and puts of 1 MiB by Python beside those of the Rust
client (`tidepool bench store`), which take turns on the same node. `soak`: whether 10 million operations leave memory behind (soak.py).
"""

import argparse
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MIB = 1 << 20
OBJECTS = 256
VALUES = 16
IMPORT = "import time; began = time.perf_counter(); import tidepool; print(time.perf_counter() - began)"


def percentile(waits, share):
    return sorted(waits)[min(len(waits) - 1, int(len(waits) * share))]


class Node:
    """A node with 1 GiB."""

    def __init__(self, folder, segments):
        settings = [f"dram.folder={segments}", "admin.listen=127.0.0.1:0", "grpc.listen=127.0.0.1:0", "engine.listen=127.0.0.1:0"]
        command = [os.environ["NODE_PROGRAM"], "serve", "--json", "--data", f"{folder}/data", "--dram", "1GiB", "--nvme", "0"]
        for setting in settings:
            command += ["--set", setting]
        self.log = open(f"{folder}/log", "ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the node did not start: {Path(self.log.name).read_text()[-2000:]}")
        self.endpoint = f"unix:{json.loads(line)['unix']}"

    def stop(self):
        self.process.kill()
        self.process.wait()


def by_rust(endpoint, operation, seconds):
    """Microseconds: the median of calls of the Rust client."""
    command = [os.environ["NODE_PROGRAM"], "bench", "store", "--json", "--endpoint", endpoint, "--ways", "local", "--threads", "1"]
    command += ["--operations", operation, "--block", "1MiB", "--total", f"{OBJECTS}MiB", "--seconds", str(seconds), "--lendable"]
    line = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    return line["p50_us"]


def by_python(endpoint, operation, seconds, turn):
    """The same by Python, with as many objects and as much memory."""
    import tidepool

    now, waits = time.perf_counter_ns, []
    with tidepool.Store.connect(endpoint) as store:
        pool = memoryview(tidepool.allocate(VALUES * MIB))
        for place in range(0, VALUES * MIB, MIB):
            pool[place : place + MIB] = os.urandom(MIB)
        values = [pool[place : place + MIB] for place in range(0, VALUES * MIB, MIB)]
        keys = [f"own/{turn}/{number}" for number in range(OBJECTS)]
        if operation == "get":
            store.put_batch(keys, list(itertools.islice(itertools.cycle(values), OBJECTS)))
            # Begins with a page, as what the allocator of the other side gives; a bytearray does not, which costs the copy a tenth.
            buffer = mmap.mmap(-1, MIB)
            while not store.local_hits:
                store.get_into(keys[0], buffer)
        end = time.monotonic() + seconds
        for call in itertools.count():
            if operation == "get":
                key = keys[call % OBJECTS]
                before = now()
                length = store.get_into(key, buffer)
                waits.append(now() - before)
                assert length == MIB
            else:
                key, value = f"{keys[0]}/{call}", values[call % VALUES]
                before = now()
                stored = store.put(key, value)
                waits.append(now() - before)
                assert stored
            if time.monotonic() > end:
                break
        store.remove_all()
    return percentile(waits, 0.5) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="import, overhead, soak; none: all")
    parser.add_argument("--quick", action="store_true", help="shorter: shows that it works, proves nothing")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    wanted = parser.parse_args()
    known = ["import", "overhead", "soak"]
    parts = wanted.parts or known
    if unknown := set(parts) - set(known):
        parser.error(f"there is no {sorted(unknown)[0]}")
    missed = 0

    def say(name, target, value, text):
        nonlocal missed
        met = value <= target
        missed += not met
        line = {"name": name, "target": target, "value": value, "met": met}
        print(json.dumps(line) if wanted.json else f"{name:<36}<= {target:<6g}{text}  {'met' if met else 'MISSED'}", flush=True)

    if "import" in parts:
        took = [float(subprocess.check_output([sys.executable, "-c", IMPORT])) * 1e3 for _ in range(11)]
        say("import tidepool, ms", 100, statistics.median(took), f"{statistics.median(took):.1f} [{min(took):.1f}, {max(took):.1f}]")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as segments:
        node = Node(folder, segments)
        try:
            for operation in ("get", "put") if "overhead" in parts else ():
                turns, seconds = (2, 0.3) if wanted.quick else (11, 1.0)
                pairs = [
                    (by_python(node.endpoint, operation, seconds, turn), by_rust(node.endpoint, operation, seconds))
                    for turn in range(turns)
                ]
                ratio = statistics.median(own / other for own, other in pairs)
                own, other = (statistics.median(side) for side in zip(*pairs))
                say(f"{operation} of 1 MiB, Python / Rust, p50", 1.1, ratio, f"{ratio:.3f}, {own:.1f} beside {other:.1f} us")
            if "soak" in parts:
                command = [sys.executable, str(HERE / "soak.py"), node.endpoint, *["--json"] * wanted.json]
                command += ["--operations", "200000"] if wanted.quick else []
                missed += subprocess.run(command).returncode != 0
        finally:
            node.stop()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
