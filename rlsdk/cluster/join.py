"""Replacement for the Python that Ray starts: have a template process fork the worker, or exec that Python.

Ray runs this file as `py_executable`, with the template's socket and Python's arguments. It imports almost nothing,
since its purpose is to save the time of imports.
"""

import json
import os
import socket
import sys

PATIENCE = 25.0
"""Seconds to wait for a template that is still importing; Ray waits 60 s for a worker to report."""


def main() -> None:
    """Request a fork with this process's arguments, environment and streams, and stay alive as long as it does."""
    path, *arguments = sys.argv[1:]
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    forked = b""
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(path)
            socket.send_fds(template, [len(request).to_bytes(8, "big")], [0, 1, 2])
            template.sendall(request)
            template.settimeout(PATIENCE)
            if forked := template.recv(1):
                template.settimeout(None)
                template.sendall(b"g")
                template.recv(1)  # until the worker ends
    except OSError:  # the template has ended or is too busy
        pass
    if not forked:
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
