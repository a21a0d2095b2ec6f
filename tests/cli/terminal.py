"""A command in a terminal of its own: what is typed reaches it as from a keyboard, Ctrl-C as a signal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

CTRL_C, CTRL_D = "\x03", "\x04"
# A session's first terminal becomes the one whose Ctrl-C it obeys.
LAUNCH = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, "-m", "pensieve_jax.cli", *sys.argv[2:]])
"""


class Terminal:
    """Starts `pensieve` with the arguments given. Use as a context manager."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        name = os.ttyname(slave)
        command = [sys.executable, "-c", LAUNCH, name, *map(str, arguments)]
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "200"}
        self._process = subprocess.Popen(command, start_new_session=True, env=environment)
        self._slave = slave
        self._unread = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def expect(self, pattern, timeout_s=120.0):
        """Read until the pattern has come; returns all that came since the last one, up to its end."""
        end = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self._unread)):
            ready, _, _ = select.select([self._master], [], [], 0.5)
            if not ready:
                alive = self._process.poll() is None
                assert alive and time.monotonic() < end, f"{pattern!r} did not come; got {self._unread!r}"
                continue
            self._unread += os.read(self._master, 65536).decode(errors="replace").replace("\r\n", "\n")
        seen, self._unread = self._unread[: match.end()], self._unread[match.end() :]
        return seen

    def wait(self, timeout_s=60.0):
        """The exit status."""
        return self._process.wait(timeout_s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._slave)
        os.close(self._master)
