"""Prints the bytes of a checkpoint's weights and the peak of this process's anonymous memory in loading them.

A program of its own, since only a fresh process has a peak of its own: `measure_loading.py FOLDER DTYPE`.
"""

import sys
import threading
import time
from pathlib import Path

import jax

from pensieve_jax.models import load_model
from pensieve_jax.models.loading import parameter_bytes


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def main() -> None:
    jax.block_until_ready(jax.numpy.zeros(8))  # Starts the backend, which is not part of the measure.
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(sys.argv[1], dtype=sys.argv[2])
    done.set()
    watcher.join()
    print(parameter_bytes(model), peak - before)


if __name__ == "__main__":
    main()
