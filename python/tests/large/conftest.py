"""Collected only when asked for: these take 15 GiB of memory and minutes."""

import os

collect_ignore_glob = [] if os.environ.get("LARGE") else ["test_*.py"]
