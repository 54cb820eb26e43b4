"""Replace Ray's dashboard agent, which a raylet requires even without a dashboard.

Ray's minimal agent reports that it serves nothing, and waits. This one does the same without importing Ray.
"""

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Files in the session's folder in which the raylet looks for the agent's ports."""


def main() -> None:
    """Report that there are no ports, and live as long as the raylet."""
    raylet = os.getppid()
    given = dict(argument[2:].split("=", 1) for argument in sys.argv if argument.startswith("--") and "=" in argument)
    for name in PORTS:
        path = os.path.join(given["session-dir"], f"{name}_{given['node-id']}")
        with open(f"{path}.written", "w") as file:
            file.write("-1")
        os.rename(file.name, path)  # atomic, since the raylet may read it at any time
    while os.getppid() == raylet:
        time.sleep(1)


if __name__ == "__main__":
    main()
