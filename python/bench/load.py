"""One side of `beside.py`: does what it is told through `mooncake.store`, whichever distribution that comes from.

Reads one JSON command a line, answers each with one JSON line. A command names an operation, a size in bytes, a number of
keys a call (`batch`, 0: the plain call), seconds, and a tag that keeps the keys of different commands apart.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time

from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator

POOL = 128 << 20
"""Bytes of a thread's source, and of its target."""


class Memory:
    """Bytes with an address, of the distribution's allocator or another. All are touched, so that no call pays for a fault."""

    def __init__(self, fill, allocator=None):
        if allocator:
            self.address = allocator.alloc(POOL)
            assert self.address, "no memory"
            self.bytes = memoryview((ctypes.c_char * POOL).from_address(self.address)).cast("B")
        else:
            self.bytes = mmap.mmap(-1, POOL)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        for at in range(0, POOL, len(fill)):
            self.bytes[at : at + len(fill)] = fill


class Worker:
    """One client thread with memory of its own."""

    def __init__(self, store, number):
        self.store, self.number = store, number
        self.allocator = MooncakeHostMemAllocator()
        self.source, self.target = (Memory(fill, self.allocator) for fill in (os.urandom(1 << 20), bytes(1 << 20)))
        self.other = None

    def register(self):
        for memory in (self.source, self.target):
            assert self.store.register_buffer(memory.address, POOL) == 0, "memory can't be registered"

    def unregistered(self):
        if self.other is None:
            self.other = Memory(os.urandom(1 << 20))
        return self.other

    def calls(self, command):
        """A function that does call number `n`, and answers whether it did what it should."""
        operation, size, batch = command["op"], command["size"], command["batch"]
        store, tag = self.store, f"{command['tag']}/{self.number}"
        count = max(1, batch)
        stored = [[f"{tag}/{call}/{place}" for place in range(count)] for call in range(command["calls"])]
        step = max(size, 1)
        source = self.unregistered() if command.get("unregistered") else self.source
        slots = [place * step % (POOL - step + 1) for place in range(count)]
        sources, targets = [source.address + slot for slot in slots], [self.target.address + slot for slot in slots]
        sizes, value = [size] * count, bytes(source.bytes[:size])

        def keys(call):
            return stored[call % len(stored)]

        def walk(base, call):
            # A single value goes through the whole pool, as the batches do: the caches hold none of it.
            return base.address + call * step % (POOL - step + 1)

        return {
            "put": lambda call: store.put(keys(call)[0], value) == 0,
            "get": lambda call: len(store.get(keys(call)[0])) == size,
            "put_from": lambda call: store.put_from(keys(call)[0], walk(source, call), size) == 0,
            "get_into": lambda call: store.get_into(keys(call)[0], walk(self.target, call), size) == size,
            "batch_put_from": lambda call: not any(store.batch_put_from(keys(call), sources, sizes)),
            "batch_get_into": lambda call: store.batch_get_into(keys(call), targets, sizes) == sizes,
            "is_exist": lambda call: store.is_exist(keys(call)[0]) == 1,
            "batch_is_exist": lambda call: all(found == 1 for found in store.batch_is_exist(keys(call))),
        }[operation]

    def run(self, command, together, answer):
        call, seconds = self.calls(command), command["seconds"]
        limit = command["calls"] if "put" in command["op"] else 1 << 60
        waits, failed, now = [], 0, time.perf_counter_ns
        together.wait()
        began = now()
        end = began + int(seconds * 1e9)
        while len(waits) < limit:
            before = now()
            if before > end and len(waits) > 2:
                break
            failed += not call(len(waits))
            waits.append(now() - before)
        answer[self.number] = (began, now(), waits, failed)


def right(worker, command):
    """Whether a value that was just read is the one that was written, byte for byte."""
    if command["op"] not in ("get_into", "batch_get_into"):
        return True
    size = command["size"]
    worker.target.bytes[:size] = bytes(size)
    key = f"{command['tag']}/{worker.number}/0/0"
    return worker.store.get_into(key, worker.target.address, size) == size and (
        worker.target.bytes[:size] == worker.source.bytes[:size]
    )


def percentile(waits, share):
    return sorted(waits)[min(len(waits) - 1, int(len(waits) * share))]


def execute(workers, command):
    threads = command["threads"]
    together, answer = threading.Barrier(threads), [None] * threads
    cpu = time.process_time()
    running = [threading.Thread(target=worker.run, args=(command, together, answer)) for worker in workers[:threads]]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    waits = [wait for row in answer for wait in row[2]]
    seconds = (max(row[1] for row in answer) - min(row[0] for row in answer)) / 1e9
    keys = len(waits) * max(1, command["batch"])
    return {
        "calls": min(len(row[2]) for row in answer),
        "keys_per_second": keys / seconds,
        "bytes_per_second": keys * command["size"] / seconds,
        "p50_us": percentile(waits, 0.5) / 1e3,
        "p99_us": percentile(waits, 0.99) / 1e3,
        "cpu_seconds": time.process_time() - cpu,
        "bytes": keys * command["size"],
        "failed": sum(row[3] for row in answer),
        "right": all(right(worker, command) for worker in workers[:threads]),
    }


def main():
    setup = json.loads(sys.argv[1])
    store = MooncakeDistributedStore()
    code = store.setup(*setup["arguments"])
    if code != 0:
        sys.exit(f"setup answers {code}")
    workers = [Worker(store, number) for number in range(setup["threads"])]
    for worker in workers:
        worker.register()
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "clear":
            answer = {"removed": store.remove_all(True)}
        elif command["op"] == "fill":
            # First touch of the memory behind, which both sides lend lazily or not.
            value, count = os.urandom(16 << 20), command["bytes"] // (16 << 20)
            answer = {"filled": sum(store.put(f"fill/{number}", value) == 0 for number in range(count))}
        else:
            answer = execute(workers, command)
        print(json.dumps(answer), flush=True)
    # The reference's threads are not asked to end: they may be in a call.
    os._exit(0)


main()
