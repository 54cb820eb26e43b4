"""What `rlsdk check --start` finds in engines and learners that are wrong in one way."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.batch import LossInputs, Totals, aggregate
from rlsdk.components import component_of
from rlsdk.contracts import Request, Weights
from rlsdk.engines.transformers import Transformers
from rlsdk.errors import ConformanceFault
from rlsdk.plugins import Plugins
from rlsdk.testing.conformance import Check, check_plugin, properties
from rlsdk.testing.findings import PropertyResult
from rlsdk.testing.subject import Subject
from rlsdk.testing.trials import try_rules
from rlsdk.weights import to_weights


def results(cls: type, folder: Path, only: str = "") -> dict[str, dict[str, str]]:
    """The results of a class's properties in this process; `only` one and those that it needs."""
    component = component_of(cls)
    assert component is not None
    every = {p.name: p for p in properties(component, start=True) if p.starts}
    chosen = [p for p in every.values() if not only or p.name == only or p.name in every[only].after]
    found = try_rules(Subject(component), chosen, folder)
    return dict(zip((p.name for p in chosen), found, strict=True))


class Shorter(Transformers):
    def step(self) -> Any:
        return [attrs.evolve(c, logprobs=c.logprobs[:-1]) for c in super().step()]


class Lists(Transformers):
    def step(self) -> Any:
        return [attrs.evolve(c, token_ids=c.token_ids.tolist()) for c in super().step()]


class Changed(Transformers):
    """Changes requests before it adds them."""

    changes: ClassVar[dict[str, Any]] = {}

    def add(self, requests: Any) -> None:
        super().add([attrs.evolve(r, **self.changed(r)) for r in requests])

    def changed(self, request: Request) -> dict[str, Any]:
        return dict(self.changes)


class One(Changed):
    changes: ClassVar[dict[str, Any]] = {"n": 1}


class Seedless(Changed):
    changes: ClassVar[dict[str, Any]] = {"seed": None}


class SameSeed(Changed):
    changes: ClassVar[dict[str, Any]] = {"seed": 1}


class Endless(Changed):
    def changed(self, request: Request) -> dict[str, Any]:
        return {"sampling": attrs.evolve(request.sampling, ignore_eos=True)}


class NoStrings(Changed):
    def changed(self, request: Request) -> dict[str, Any]:
        return {"sampling": attrs.evolve(request.sampling, stop=())}


class OneTemperature(Changed):
    def changed(self, request: Request) -> dict[str, Any]:
        warm = request.sampling.temperature
        return {"sampling": attrs.evolve(request.sampling, temperature=1.0 if warm else warm)}


class CutsTheEnd(Transformers):
    def step(self) -> Any:
        return [self.cut(c) if c.finish == "stop" else c for c in super().step()]

    @staticmethod
    def cut(c: Any) -> Any:
        return attrs.evolve(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1], versions=c.versions[:-1])


class OtherId(Transformers):
    def step(self) -> Any:
        return [attrs.evolve(c, request=f"cmpl-{c.request}") for c in super().step()]


class NeverDone(Transformers):
    @property
    def unfinished(self) -> int:
        return max(super().unfinished, 6)


class OldWeights(Transformers):
    def load_weights(self, weights: Weights) -> None:
        self._version = weights.version


class OldVersion(Transformers):
    def load_weights(self, weights: Weights) -> None:
        super().load_weights(attrs.evolve(weights, version=0))


class AbortsAll(Transformers):
    def abort(self, ids: Any = None) -> Any:
        return super().abort(None)


class Shifted(Transformers):
    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return np.roll(super().logprobs(token_ids), 1)


class Forgetful(Transformers):
    def sleep(self) -> None:
        self.abort()
        super().sleep()


class AnyLength(Transformers):
    def start(self, model: Any, place: Any) -> None:
        super().start(attrs.evolve(model, max_length=500), place)


class Unable(Transformers):
    def start(self, model: Any, place: Any) -> None:
        raise RuntimeError(f"no kernel for {place.device}")


ENGINES = [
    (Shorter, "sound-completions", "expected an array of"),
    (Lists, "answers-requests", "AttributeError"),
    (One, "answers-requests", "none for r0[1], r0[2], r2[1]"),
    (OtherId, "answers-requests", "cmpl-r"),
    (NeverDone, "answers-requests", "still running"),
    (Seedless, "obeys-seeds", "other tokens"),
    (SameSeed, "obeys-seeds", "the same"),
    (Endless, "ends-where-it-should", "with finish 'length'"),
    (NoStrings, "ends-where-it-should", "with finish"),
    (CutsTheEnd, "ends-where-it-should", "with finish 'stop'"),
    (OneTemperature, "true-logprobs", "-"),
    (OldWeights, "loads-weights", "-"),
    (OldVersion, "loads-weights", "version 0"),
    (AbortsAll, "aborts", "('r1', 0, 'abort')"),
    (Shifted, "computes-logprobs", "-"),
    (Forgetful, "survives-sleep", "none for r0[0]"),
    (AnyLength, "obeys-the-models-length", "40 tokens with finish"),
    (Unable, "starts", "no kernel for cpu"),
]


@pytest.mark.parametrize(("cls", "name", "got"), ENGINES, ids=lambda value: getattr(value, "__name__", None))
def test_an_engine_that_is_wrong_in_one_way_is_found(cls: type, name: str, got: str, tmp_path: Path) -> None:
    marked = rlsdk.engine(cls.__name__.lower())(type(cls.__name__, (cls,), {}))
    found = results(marked, tmp_path, name)
    assert got in found[name].get("got", ""), found
    assert [each for each, held in found.items() if "sort" in held] == [name]


@rlsdk.learner("plain")
@attrs.define(kw_only=True, eq=False)
class Plain:
    """A learner of one rank in plain torch; subclasses are wrong in one way.

    Attributes:
        lr: Learning rate.
        micro_batch_tokens: Tokens of a micro-batch.
    """

    lr: float = 1e-3
    micro_batch_tokens: int = 1000
    net: Any = attrs.field(init=False, default=None)
    optimizer: Any = attrs.field(init=False, default=None)
    loss: Any = attrs.field(init=False, default=None)
    warmth: float = attrs.field(init=False, default=1.0)

    def environment(self, place: Any) -> Mapping[str, str]:
        return {}

    def start(self, roles: Any, loss: Any, place: Any, total_updates: int) -> None:
        from transformers import AutoModelForCausalLM

        self.net = AutoModelForCausalLM.from_pretrained(roles.actor.path)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.lr, weight_decay=0.0)
        self.loss, self.warmth = Plugins().resolve(loss.policy_loss), loss.temperature

    def forward(self, batch: Any) -> torch.Tensor:
        found, offset = [], 0
        for length, start, count in zip(batch.lengths, batch.starts, batch.responses, strict=True):
            ids = torch.from_numpy(batch.token_ids[offset : offset + length])
            log_p = (self.net(ids[None]).logits[0] / self.warmth).log_softmax(-1)[start - 1 : start - 1 + count]
            found.append(log_p.gather(1, ids[start : start + count, None])[:, 0])
            offset += length
        return torch.cat(found)

    def logprobs(self, batch: Any, role: str = "actor", fields: Any = ("logprobs",)) -> dict[str, np.ndarray]:
        return {"logprobs": self.forward(batch).detach().numpy()}

    def values(self, batch: Any) -> np.ndarray:
        raise NotImplementedError

    def update(self, minibatches: Any, step: int) -> dict[str, float]:
        for batch, tokens, rollouts in minibatches:
            count = max(1, len(batch) * self.micro_batch_tokens // max(int(batch.lengths.sum()), 1))
            for at in range(0, len(batch), count):
                self.backward(batch.select(np.arange(at, min(at + count, len(batch)))), Totals(tokens, rollouts))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"actor/loss": 0.0}

    def backward(self, part: Any, totals: Totals) -> None:
        mask = torch.from_numpy(part.loss_mask)
        segments = torch.from_numpy(np.repeat(np.arange(len(part)), part.responses))
        fields = {name: torch.from_numpy(value) for name, value in part.tokens.items()}
        x = LossInputs(self.forward(part), loss_mask=mask, segments=segments, **fields)
        self.reduce(self.loss(x), x, totals).backward()

    def reduce(self, values: torch.Tensor, x: LossInputs, totals: Totals) -> torch.Tensor:
        return aggregate(values, x.loss_mask, x.segments, "token-mean", totals=totals)

    def weights(self, version: int) -> Weights:
        return to_weights(version, {n: p.detach() for n, p in self.net.named_parameters()})

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(token_ids)
        with torch.no_grad():
            return self.net(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()

    def save(self, folder: Path) -> None:
        torch.save(self.state(), folder / "state.pt")

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt")
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state.get("optimizer") or self.optimizer.state_dict())

    def export(self, folder: Path) -> None:
        self.net.save_pretrained(folder)

    def stop(self) -> None:
        self.net = None


class MeanOfMicroBatch(Plain):
    def reduce(self, values: torch.Tensor, x: LossInputs, totals: Totals) -> torch.Tensor:
        return values[x.loss_mask].mean()


class OwnTotals(Plain):
    def update(self, minibatches: Any, step: int) -> dict[str, float]:
        own = [(b, b.totals.tokens, b.totals.rollouts) for b, _, _ in minibatches]
        return super().update(own, step)


class NoMoments(Plain):
    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}


class NoWeightsInCheckpoint(Plain):
    def load(self, folder: Path) -> None:
        self.optimizer.load_state_dict(torch.load(folder / "state.pt")["optimizer"])


class FewerTensors(Plain):
    def weights(self, version: int) -> Weights:
        sent = super().weights(version)
        return attrs.evolve(sent, tensors={n: t for n, t in sent.tensors.items() if "norm" not in n})


class Prefixed(Plain):
    def weights(self, version: int) -> Weights:
        sent = super().weights(version)
        named = {f"module.{n}": t for n, t in sent.tensors.items()}
        return Weights(version, named, {f"module.{n}": d for n, d in sent.dtypes.items()})


class FirstWeights(Plain):
    def start(self, roles: Any, loss: Any, place: Any, total_updates: int) -> None:
        super().start(roles, loss, place, total_updates)
        self.sent = copy.deepcopy(super().weights(0))

    def weights(self, version: int) -> Weights:
        return attrs.evolve(self.sent, version=version)


class Upwards(Plain):
    def reduce(self, values: torch.Tensor, x: LossInputs, totals: Totals) -> torch.Tensor:
        return -super().reduce(values, x, totals)


class Cold(Plain):
    def start(self, roles: Any, loss: Any, place: Any, total_updates: int) -> None:
        super().start(roles, loss, place, total_updates)
        self.warmth = 1.0


class EveryToken(Plain):
    def reduce(self, values: torch.Tensor, x: LossInputs, totals: Totals) -> torch.Tensor:
        return values.sum() / totals.tokens


class ExportsOthers(Plain):
    def export(self, folder: Path) -> None:
        net = copy.deepcopy(self.net)
        net.model.norm.weight.data += 1
        net.save_pretrained(folder)


LEARNERS = [
    (MeanOfMicroBatch, "micro-batches", "one that differs by"),
    (OwnTotals, "divides-by-the-totals", "the same"),
    (NoMoments, "resumes", "differs by up to"),
    (NoWeightsInCheckpoint, "resumes", "differs by up to"),
    (FewerTensors, "sends-all-weights", "none of model.layers.0.input_layernorm.weight"),
    (Prefixed, "sends-all-weights", "none of model.embed_tokens.weight"),
    (FirstWeights, "learns", "the same"),
    (Upwards, "learns", "of the gradient, by size"),
    (Cold, "computes-logprobs", "-"),
    (EveryToken, "trains-masked-tokens-only", "one that differs by"),
    (ExportsOthers, "exports", "model.norm.weight differs by up to 1"),
]


@pytest.mark.parametrize(("cls", "broken"), [(Transformers, ENGINES), (Plain, LEARNERS)])
def test_every_property_of_a_started_component_is_broken_by_one(cls: type, broken: Any) -> None:
    component = component_of(cls)
    assert component is not None
    every = {p.name: p for p in properties(component, start=True) if p.starts}
    assert set(every) - {name for _, name, _ in broken} <= {"starts"}
    assert all(p.demand.endswith(".") and p.remedy for p in every.values())


def test_a_learner_in_plain_torch_has_all_properties(tmp_path: Path) -> None:
    assert {name: held for name, held in results(Plain, tmp_path).items() if held} == {}


@pytest.mark.parametrize(("cls", "name", "got"), LEARNERS, ids=lambda value: getattr(value, "__name__", None))
def test_a_learner_that_is_wrong_in_one_way_is_found(cls: type, name: str, got: str, tmp_path: Path) -> None:
    marked = rlsdk.learner(cls.__name__.lower())(type(cls.__name__, (cls,), {}))
    found = results(marked, tmp_path, name)
    assert got in found[name].get("got", ""), found
    assert [each for each, held in found.items() if "sort" in held] == [name]


LAB = """
import os
import rlsdk
from rlsdk.engines.transformers import Transformers


@rlsdk.engine("dying")
class Dying(Transformers):
    def step(self):
        print("a last word", flush=True)
        os._exit(3)
"""


def test_a_process_that_ends_while_a_property_is_checked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    report = check_plugin(Plugins(), "deadly.py", start=True)
    found = {each.rule: each for each in report.findings}
    assert found["starts"].outcome == "passed"
    fault = found["answers-requests"].fault
    assert isinstance(fault, ConformanceFault)
    assert "the process ended with status 3" in fault.got and "a last word" in fault.got
    assert found["true-logprobs"].reason.startswith("answers-requests")


def test_without_start_only_methods_are_checked_and_the_output_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from rlsdk.cli import root

    (tmp_path / "deadly.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(root, ["check", "deadly.py"], env={"COLUMNS": "200"}).output
    assert "only the methods of engines were checked" in said and "rlsdk check deadly.py --start" in said


def test_an_object_that_no_process_can_import_is_not_started() -> None:
    component = component_of(Plain)
    assert component is not None
    found: list[PropertyResult] = Check(Subject(component), start=True).findings()
    skipped = {each.rule: each.reason for each in found if each.outcome == "skipped"}
    assert "check its plugin or file instead" in skipped["starts"]
