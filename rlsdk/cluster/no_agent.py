"""Stand in for the agent of Ray's dashboard, which a raylet insists on, where there is no dashboard.

A minimal agent of Ray's says that it serves nothing, and waits. This one says the same without importing Ray.
"""

import os
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Files in the session's folder in which the raylet looks for the agent's ports."""


def main() -> None:
    """Write that there are no ports, and stay for as long as the raylet does."""
    raylet = os.getppid()
    given = dict(argument[2:].split("=", 1) for argument in sys.argv if argument.startswith("--") and "=" in argument)
    for name in PORTS:
        path = os.path.join(given["session-dir"], f"{name}_{given['node-id']}")
        with open(f"{path}.written", "w") as file:
            file.write("-1")
        os.rename(file.name, path)  # the raylet may read it at any time
    while os.getppid() == raylet:
        time.sleep(1)


if __name__ == "__main__":
    main()
