"""Replace Ray's script of this name, which sets the environment of each worker and then becomes the worker.

Ray's script imports half of Ray before every worker. This one imports only the standard library, and delegates
whatever a local run does not need (containers, other languages) to Ray's.
"""

import argparse
import json
import os
import re
import shlex
import sys
import sysconfig

PLAIN = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}
"""Parts of a context, of which the last two must be empty here."""


def main() -> None:
    """Set the variables of the worker's environment and run its Python."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, worker = parser.parse_known_args()
    context = json.loads(known.serialized_runtime_env_context or "{}")
    foreign = context.keys() - PLAIN or context.get("override_worker_entrypoint") or context.get("java_jars")
    if foreign or known.language != "PYTHON":
        theirs = os.path.join(sysconfig.get_path("purelib"), "ray", "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, theirs, *sys.argv[1:]])
    for name, value in (context.get("env_vars") or {}).items():
        # As in Ray: variables in the value are expanded, unset ones to nothing.
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    python = context.get("py_executable") or sys.executable  # in shell syntax
    command = [*(context.get("command_prefix") or ()), "exec", python, *map(shlex.quote, worker)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


if __name__ == "__main__":
    main()
