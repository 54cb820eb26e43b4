"""Domains of ROLL's RLVR pipeline: their rewards, filters and shares of the tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.values import number, text, texts

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "MathRuleRewardWorker": {"use": "math"},
    "CodeSandboxRewardWorker": {"use": "code_tests"},
    "CrossThinkQARuleRewardWorker": {"use": "exact_match", "where": "answer"},
}
"""Worker of a reward -> what is nearest here."""


def convert_worker(value: str, given: Given) -> KeyOutcome:
    """Report the worker of a domain's rewards, which `reward_of` converts."""
    name = value.rsplit(".", 1)[-1]
    if name in REWARDS:
        return KeyOutcome({}, "the nearest built-in reward")
    if name == "GeneralRuleRewardWorker":
        note = (
            "IFEval's instructions are checked by ifeval/followed of rlsdk-ifeval; its tasks name them in two columns"
        )
        return KeyOutcome.missing(f"{note} (howto/ifeval.md)")
    if "Judge" not in name:
        return KeyOutcome.missing("no built-in reward is like it: write one (howto/reward.md)")
    if any(_judge(domain, given) for domain in given.section("rewards")):
        return KeyOutcome({}, "a judge with rlsdk's own rubric and form of the score")
    note = "no built-in reward is like it: use judge, with base_url and model of a server such as vLLM's"
    return KeyOutcome.missing(note)


def _judge(domain: str, given: Given) -> dict[str, Any]:
    """Return the reward of a judge that is called through its API; empty if there is none."""
    where = f"rewards.{domain}.judge"
    url, model = given.read(f"{where}_api_url", text), given.read(f"{where}_model_name", text)
    if url is None or model is None or str(given.get(f"{where}_model_type", "api")) != "api":
        return {}
    key = re.fullmatch(r"\$\{oc\.env:(\w+)[^}]*\}", str(given.get(f"{where}_api_key")))
    return {"use": "judge", "base_url": url, "model": model, **({"api_key_env": key[1]} if key else {})}


def reward_of(domain: str, given: Given) -> dict[str, Any]:
    """Return the reward of a domain; empty if there is none like it."""
    name = str(given.get(f"rewards.{domain}.worker_cls", "")).rsplit(".", 1)[-1]
    return dict(REWARDS.get(name) or (_judge(domain, given) if "Judge" in name else {}))


def convert_sources(_: Any, given: Given) -> KeyOutcome:
    """Report the tags of tasks that a domain's reward scores."""
    if reward_of(given.key.split(".")[1], given):
        return KeyOutcome({}, "sources of the reward")
    return KeyOutcome.ignored("sources of the reward that worker_cls needs")


def convert_judge_key(value: Any, _: Given) -> KeyOutcome:
    """Report the key of a judge's API, which must be in an environment variable."""
    if str(value).startswith("${oc.env:"):
        return KeyOutcome({})
    return KeyOutcome.missing("put it into an environment variable, and name that in the judge's api_key_env")


def _filter_of(domain: str, given: Given) -> dict[str, Any] | None:
    """Return the filter by which a domain's tasks are replaced."""
    where = f"rewards.{domain}.query_filter_config"
    if (kind := str(given.get(f"{where}.type"))) == "mean_filter":
        bounds = {"low": "threshold_down", "high": "threshold_up"}
        read = {end: given.read(f"{where}.filter_args.{key}", number) for end, key in bounds.items()}
        usual = {"low": -1.0, "high": 2.0}  # beyond all shares
        return {"use": "pass_rate", **{end: usual[end] if value is None else value for end, value in read.items()}}
    least = given.read(f"{where}.filter_args.std_threshold", number, -1.0)
    return {"use": "min_std", "threshold": least} if kind == "std_filter" and least >= 0 else None


def filters_of_domains(given: Given) -> list[dict[str, Any]]:
    """Return the filter of all domains that have one; empty if they differ."""
    found = [each for domain in given.section("rewards") if (each := _filter_of(domain, given))]
    return found[:1] if all(each == found[0] for each in found) else []


def convert_filter(value: str, given: Given) -> KeyOutcome:
    """Report the filter of a domain's tasks, which `filters_of_domains` converts."""
    if value == "no_filter":
        return KeyOutcome.ignored("off")
    if not filters_of_domains(given):
        return KeyOutcome.missing("a filter applies to all domains, and theirs differ: write one (howto/plugin.md)")
    notes = ["by the share of rollouts that pass, ROLL by their mean reward"] if value == "mean_filter" else []
    notes += ["applies to all domains"] if len(given.section("rewards")) > 1 else []
    return KeyOutcome({}, "; ".join(notes))


def files_of_domains(given: Given) -> dict[str, list[str]]:
    """Return the files of each domain, which their names tell; empty if they do not, or if there is one domain."""
    where = "actor_train.data_args"
    shares = given.section(f"{where}.domain_interleave_probs")
    domains: dict[str, list[str]] = {domain: [] for domain, share in shares.items() if share}
    for path in given.read(f"{where}.file_name", texts, []):
        name = re.sub(r"[^a-z]", "", PurePath(path).stem.lower())
        fitting = [each for each in domains if _named(each, name)]
        if len(fitting) != 1:
            return {}
        domains[fitting[0]].append(path)
    return domains if len(domains) > 1 and all(domains.values()) else {}


def _named(domain: str, name: str) -> bool:
    """True if the name of a file has the name of a domain in it, such as `math_rule`, or the long words of one."""
    words = [word for word in domain.lower().split("_") if word not in ("rule", "sandbox", "cv")]
    return all(re.sub(r"[^a-z]", "", word) in name for word in words)


def convert_share(value: float, given: Given) -> KeyOutcome:
    """Report the share of a domain's tasks in a batch, which becomes the weight of a source."""
    if files_of_domains(given):
        return KeyOutcome({}, "the weight of a source of its own, whose files are guessed from their names")
    if value == 1:
        return KeyOutcome.ignored("the only domain")
    return KeyOutcome.missing("tasks.train: one source per domain, with its weight")
