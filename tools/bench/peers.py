"""Compare rlsdk with peers on a CPU: learning per second with TRL, core functions with verl's and OpenRLHF's.

    python tools/bench/peers.py                       # everything, one seed
    python tools/bench/peers.py --quick               # a smoke test of a few minutes; its figures mean nothing
    python tools/bench/peers.py --peers trl --seeds 0,1,2
    python tools/bench/peers.py --trl '{"compile": true, "attention": "eager"}'

Each run writes a JSON file to the output folder. docs/benchmarks_peers.md describes the method and its limits. The exit
status is 1 only if nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cores
import facts
import learning
import peers_page
from peer_venvs import PEERS, prepare

Job = Callable[[], Mapping[str, Any]]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--peers", default=",".join(PEERS), help="comma-separated peers to compare with")
    found.add_argument(
        "--sides", default=",".join(learning.RLSDK_ENGINES), help="comma-separated engines of rlsdk to train with"
    )
    found.add_argument("--seeds", default="0", help="comma-separated training seeds")
    found.add_argument("--steps", type=int, default=0, help="batches per training; 0: as in the quickstart")
    found.add_argument("--every", type=int, default=10, help="batches between two points of a curve")
    found.add_argument("--held-out", type=int, default=1000, help="number of evaluation tasks")
    found.add_argument("--quick", action="store_true", help="a smoke test of a few minutes")
    found.add_argument("--trl", type=json.loads, default={}, help="JSON: TRL's speed settings, over TRL_OWN")
    found.add_argument("--rlsdk", type=json.loads, default={}, help="JSON: rlsdk's speed settings, over RLSDK_OWN")
    found.add_argument("--out", type=Path, default=learning.ROOT / "runs" / "bench-peers", help="output folder")
    found.add_argument("--publish", action="store_true", help="also write the results to docs")
    return found


def jobs(given: argparse.Namespace, ready: Sequence[str]) -> Iterator[tuple[str, Job]]:
    """Yield the name and the job of each run; trainers take turns, seed by seed."""
    out = given.out.resolve()
    for seed in map(int, given.seeds.split(",")):
        work = partial(
            learning.export_work, out / "work", steps=given.steps, every=given.every, held_out=given.held_out, seed=seed
        )
        for side in filter(None, given.sides.split(",")):
            yield f"learning-{side}-seed{seed}", partial(train, side, work, out / f"{side}-seed{seed}", given)
        if "trl" in ready:
            yield f"learning-trl-seed{seed}", partial(train, "trl", work, out / f"trl-seed{seed}", given)
    for peer in cores.CASES:
        if peer in ready:
            yield f"cores-{peer}", partial(cores.compare_cores, peer, out / "cores", quick=given.quick)


def train(side: str, work: Callable[[], Any], folder: Path, given: argparse.Namespace) -> Mapping[str, Any]:
    """Run one training in a fresh folder, and return its record."""
    load, todo = facts.load(), work()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if side == "trl":
        own = {**learning.TRL_OWN, **given.trl}
        trained = learning.train_trl(todo, PEERS["trl"].python, folder, own)
    else:
        own = {**learning.RLSDK_OWN, **given.rlsdk}
        trained = learning.train_rlsdk(todo, side, folder, own)
    return learning.record(side, todo, own, trained, load)


def main(arguments: Sequence[str]) -> int:
    """Prepare the peers, run everything and print the tables; return the exit status."""
    given = parser().parse_args(arguments)
    wanted = [name for name in given.peers.split(",") if name]
    if unknown := sorted(
        (set(wanted) - set(PEERS)) | (set(filter(None, given.sides.split(","))) - set(learning.RLSDK_ENGINES))
    ):
        print(f"unknown: {', '.join(unknown)}; peers: {', '.join(PEERS)}; sides: {', '.join(learning.RLSDK_ENGINES)}")
        return 2
    if given.quick:
        given.steps, given.every, given.held_out = given.steps or 6, 3, 200
    ready = []
    for name in wanted:
        print(f"{name}: preparing its environment …", flush=True)
        if why := prepare(PEERS[name]):
            print(f"{name}: MISSING, {why}", flush=True)
        else:
            ready.append(name)
    records = list(run_all(jobs(given, ready), given.out))
    print(peers_page.tables(records))
    (given.out / "tables.md").write_text(peers_page.tables(records) + "\n", encoding="utf-8")
    if curves := [record for record in records if record["kind"] == "learning"]:
        peers_page.draw(curves, given.out / "learning.png")
    if given.publish and records:
        publish(given.out)
    return 0 if records else 1


def run_all(todo: Iterator[tuple[str, Job]], out: Path) -> Iterator[Mapping[str, Any]]:
    """Run each job, write its JSON and yield its record; report a failed job and continue with the next."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.json"):
        old.unlink()
    for name, job in todo:
        print(f"{name} …", flush=True)
        try:
            record = job()
        except (RuntimeError, OSError) as error:
            print(f"{name}: FAILED, {error}", flush=True)
            continue
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        yield record


def publish(out: Path) -> None:
    """Copy the JSON of a run to docs, replacing records of the same name, and write the page."""
    peers_page.FOLDER.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.json"):
        shutil.copy(path, peers_page.FOLDER / path.name)
    peers_page.write_page(peers_page.read())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
