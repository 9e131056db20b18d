"""Millions of calls of one process on a node, and whether they leave memory behind.

    python soak.py ENDPOINT [--operations 10000000] [--json]

Gets of all kinds, views, puts, questions, misses and errors, in turns. What the process holds of memory, and of Python's objects, is looked
at when a fifth of the calls is done, and at the end.
"""

import argparse
import gc
import json
import os
import sys
import time

import tidepool

SIZE = 4096
KEYS = 512
# Allowed beside what there was: caches of allocators that are filled late.
MOST_GROWTH_BYTES = 8 << 20
MOST_GROWTH_OBJECTS = 2000


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rounds(store):
    """Does one round; gives how many calls that were."""
    keys = [f"soak/{number}" for number in range(KEYS)]
    buffer, page = bytearray(SIZE), os.urandom(SIZE)
    store.put_batch(keys, [page] * KEYS)

    def once(turn):
        key = keys[turn % KEYS]
        for other in keys[turn % KEYS :][:64]:
            # One that was evicted is put again below.
            store.get(other)
            store.get_into(other, buffer)
        with store.views(keys[:4]) as views:
            assert all(view is None or len(view) == SIZE for view in views)
        store.get_view(key)
        store.get_batch(keys[:16])
        store.exists_batch(keys)
        store.get("soak/none")
        store.put(key, page)
        store.upsert(key, memoryview(page))
        try:
            store.get_into(key, bytearray(1))
        except tidepool.InvalidError:
            pass
        return 128 + 4 + 1 + 16 + KEYS + 1 + 2 + 1

    return once


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--operations", type=int, default=10_000_000, help="objects asked for, put or read, one by one or in batches")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    began, done, turn, early = time.monotonic(), 0, 0, None
    with tidepool.Store.connect(wanted.endpoint) as store:
        once = rounds(store)
        while done < wanted.operations:
            done += once(turn)
            turn += 1
            if early is None and done * 5 >= wanted.operations:
                gc.collect()
                early = resident_bytes(), sys.getallocatedblocks()
        gc.collect()
        late = resident_bytes(), sys.getallocatedblocks()
        local_hits = store.local_hits
    grown, objects = late[0] - early[0], late[1] - early[1]
    met = grown <= MOST_GROWTH_BYTES and objects <= MOST_GROWTH_OBJECTS
    figure = {
        "name": "growth of memory",
        "operations": done,
        "seconds": time.monotonic() - began,
        "early_bytes": early[0],
        "late_bytes": late[0],
        "more_objects": objects,
        "local_hits": local_hits,
        "met": met,
    }
    if wanted.json:
        print(json.dumps(figure))
    else:
        mib = 1 << 20
        print(
            f"{done} operations in {figure['seconds']:.0f} s: {early[0] / mib:.1f} MiB after a fifth, {late[0] / mib:.1f} at the end, "
            f"{objects} more objects of Python: {'met' if met else 'MISSED'}"
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
