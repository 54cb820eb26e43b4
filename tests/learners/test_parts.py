"""The pure parts of the learner: rows, objective, metrics, schedule, manifests, options."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rlsdk
from rlsdk.batch import LossInputs, Totals
from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles, TrainBatch
from rlsdk.errors import CheckpointError, LearnerError, MissingFieldError, OptionError
from rlsdk.learners.checkpoint import check_manifest, find_damage, write_manifest
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.learners.micro_batches import MicroBatchRunner
from rlsdk.learners.model import Critic, PolicyModel, load_critic, load_policy
from rlsdk.learners.model_faults import check_layers
from rlsdk.learners.objective import Objective, UpdateContext, critic_loss, needs_reference, value_loss
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import empty_rows, to_rows
from rlsdk.learners.trained import PhaseTimer
from rlsdk.marks import correction, policy_loss
from rlsdk.plugins import ComponentRef, Plugins, load

Make = Callable[..., TrainBatch]
HERE = Plugins()


def bind(loss: Any, **changes: Any) -> Objective:
    return Objective(LossSpec(policy_loss=HERE.reference("policy_loss", loss), **changes))


def moment(batch: TrainBatch, **changes: Any) -> UpdateContext:
    segments = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.responses))
    totals = Totals.of(torch.from_numpy(batch.loss_mask), segments)
    return UpdateContext(**{"update": 0, "updates": 1, "totals": totals, "seed": 0, **changes})


def logprobs_of(batch: TrainBatch) -> torch.Tensor:
    return torch.from_numpy(batch.tokens["old_logprobs"] + 0.1).requires_grad_()


@policy_loss("constant")
def constant(x: LossInputs, *, value: float = 1.0) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same loss on every token."""
    per_token = torch.arange(len(x.logprobs), dtype=torch.float32)
    return x.logprobs * 0 + value, {"number": 3.0, "position": per_token, "position_max": per_token}


@policy_loss("greedy", needs=("values",))
def reads_too_much(x: LossInputs) -> torch.Tensor:
    """Reads a field that it did not declare."""
    return x.values * x.ref_logprobs * x.logprobs


@policy_loss("mean")
def a_mean(x: LossInputs) -> torch.Tensor:
    """Takes the mean itself."""
    return x.logprobs.mean()


@correction("half")
def half(x: LossInputs) -> torch.Tensor:
    """Halves, with a graph that must not count."""
    return 0.5 + 0 * x.logprobs


class TestRows:
    def test_padded_rows_end_before_the_last_response_token(self) -> None:
        batch = TrainBatch(
            token_ids=np.array([1, 2, 3, 4, 11, 12, 13, 14, 15]),
            lengths=np.array([4, 5]),
            starts=np.array([1, 3]),
            responses=np.array([2, 2]),
            loss_mask=np.ones(4, bool),
        )
        rows = to_rows(batch, "padded")
        assert rows.input_ids.tolist() == [[1, 2, 0, 0], [11, 12, 13, 14]]
        assert rows.position_ids is None
        assert rows.states.tolist() == [0, 1, 6, 7]
        assert rows.targets.tolist() == [2, 3, 14, 15]
        rows = to_rows(batch, "packed")
        assert rows.position_ids is not None
        assert rows.input_ids.tolist() == [[1, 2, 11, 12, 13, 14]]
        assert rows.position_ids.tolist() == [[0, 1, 0, 1, 2, 3]]
        assert rows.states.tolist() == [0, 1, 4, 5]

    def test_shared_rows_hold_responses_alone(self) -> None:
        batch = TrainBatch(
            token_ids=np.array([1, 2, 3, 4, 5, 1, 2, 6, 9, 7, 8]),
            lengths=np.array([5, 3, 3]),
            starts=np.array([2, 2, 1]),
            responses=np.array([3, 1, 2]),
            loss_mask=np.ones(6, bool),
        )
        rows = to_rows(batch, "shared")
        assert rows.prompts is not None
        assert rows.position_ids is not None
        assert rows.prompts.input_ids.tolist() == [[1, 2], [9, 0]]
        assert rows.prompts.lengths.tolist() == [2, 1]
        assert rows.prompts.of_row.tolist() == [0, 0, 1]
        assert rows.input_ids.tolist() == [[3, 4], [0, 0], [7, 0]]
        assert rows.position_ids.tolist() == [[2, 3], [2, 3], [1, 2]]
        assert rows.states.tolist() == [1, 4, 5, 1, 2, 8]
        assert rows.targets.tolist() == [3, 4, 5, 6, 7, 8]

    @pytest.mark.parametrize("style", ["padded", "packed", "shared"])
    def test_a_state_is_that_before_its_target(self, style: Any, make_batch: Make) -> None:
        batch = make_batch(9, seed=4)
        rows = to_rows(batch, style)
        flat = rows.input_ids.reshape(-1)
        if rows.prompts is not None:
            flat = torch.cat([rows.prompts.input_ids.reshape(-1), flat])
        begins = np.cumsum(batch.lengths) - batch.lengths
        i = 0
        for begin, start, response in zip(begins, batch.starts, batch.responses, strict=True):
            for at in range(begin + start, begin + start + response):
                assert flat[rows.states[i]] == batch.token_ids[at - 1]
                assert rows.targets[i] == batch.token_ids[at]
                i += 1


class TestModel:
    @pytest.mark.parametrize("style", ["padded", "packed", "shared"])
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_rows_of_any_style_and_one_by_one_agree(
        self, style: Any, attention: Any, tied: Model, make_grouped_batch: Make
    ) -> None:
        batch = make_grouped_batch(7, seed=6)
        policy = load_policy(tied, attention, False)
        with torch.no_grad():
            found = policy(to_rows(batch, style))[0]
            single = torch.cat([policy(to_rows(batch.select(np.array([i])), "padded"))[0] for i in range(7)])
        torch.testing.assert_close(found, single, atol=2e-6, rtol=1e-5)

    def test_prompts_of_sliding_windows_are_not_shared(self) -> None:
        from transformers import Qwen2Config

        config = Qwen2Config(use_sliding_window=True, max_window_layers=1, num_hidden_layers=2, sliding_window=8)
        with pytest.raises(
            LearnerError, match=r"layers of type sliding_attention; rows: shared .* set learner.rows=padded"
        ):
            check_layers(config)

    def test_the_head_keeps_its_name_and_its_tie(self, tied: Model, untied: Model) -> None:
        for model, is_tied in ((tied, True), (untied, False)):
            net = load_policy(model, "sdpa", False).model
            names = net.state_dict(keep_vars=True)
            assert (names["lm_head.weight"] is names["model.embed_tokens.weight"]) == is_tied

    def test_values_start_at_zero_or_near(self, tied: Model, make_batch: Make) -> None:
        rows = to_rows(make_batch(3), "padded")
        assert not load_critic(tied, "sdpa", False, "zero")(rows).any()
        small = load_critic(tied, "sdpa", False, "small")
        assert isinstance(small, Critic)
        assert 0 < float(small(rows).detach().abs().max()) < 0.1
        torch.testing.assert_close(small(rows), load_critic(tied, "sdpa", False, "small")(rows))

    @pytest.mark.parametrize("style", ["padded", "shared"])
    def test_a_rank_without_work_has_a_graph_everywhere(self, style: Any, untied: Model) -> None:
        policy = load_policy(untied, "sdpa", False)
        (policy(empty_rows(style))[0].sum() * 0).backward()
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None, name
            assert not parameter.grad.any()

    @pytest.mark.parametrize("name", ["final_logit_softcapping", "lm_head_multiplier", "logits_soft_cap"])
    def test_logits_changed_behind_the_head_are_refused(self, name: str, tied: Model, tmp_path: Path) -> None:
        for file in Path(tied.path).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, name: 30.0}))
        with pytest.raises(LearnerError, match=rf"{name}=30\.0"):
            load_policy(Model(path=str(tmp_path)), "sdpa", False)

    def test_missing_weights_are_an_error(self, untied: Model, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        for file in Path(untied.path).iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(LearnerError, match=r"1 tensors are missing, such as model\.norm\.weight"):
            load_policy(Model(path=str(tmp_path)), "sdpa", False)


class TestObjective:
    def test_terms_add_up(self, make_batch: Make) -> None:
        batch = make_batch(5)
        changes = {"kl": HERE.reference("kl", "k2"), "kl_coef": 2.0, "entropy_coef": 0.5}
        objective = bind(constant, correction=HERE.reference("correction", half), **changes)
        now, tally = logprobs_of(batch), MetricAccumulator()
        entropy = torch.full_like(now, 1.5)
        found = objective(objective.inputs(batch, now, entropy, moment(batch)), moment(batch).totals, tally)
        mask = batch.loss_mask
        kl = 0.5 * ((now.detach().numpy() - batch.tokens["ref_logprobs"])[mask] ** 2).mean()
        assert found.item() == pytest.approx(0.5 + 2 * kl - 0.75, rel=1e-5)
        tally.add("actor/loss", 0.0)
        means = tally.means()
        assert means["actor/loss"] == pytest.approx(found.item())
        assert means["actor/number"] == 3
        assert means["actor/position"] == pytest.approx(np.flatnonzero(mask).mean())
        assert means["actor/position_max"] == np.flatnonzero(mask).max()
        assert means["actor/correction"] == 0.5
        assert means["actor/entropy"] == 1.5
        assert means["actor/ref_kl"] == pytest.approx(kl, rel=1e-5)
        assert means["actor/ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)
        assert objective.entropy == "gradient"
        assert bind(constant).entropy == "value"

    def test_a_metric_of_a_name_that_is_taken_does_not_mix_with_the_other(self, make_batch: Make) -> None:
        @policy_loss("telling")
        def telling(x: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
            return x.logprobs * 0 + 1, {"cut": 0.5, "loss": 9.0, "ratio": 7.0}

        @correction("telling")
        def weights(x: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
            return torch.ones_like(x.logprobs), {"cut": 0.25, "k3": 0.125}

        batch, tally = make_batch(5), MetricAccumulator()
        objective = bind(telling, correction=HERE.reference("correction", weights))
        objective(objective.inputs(batch, logprobs_of(batch), None, moment(batch)), moment(batch).totals, tally)
        tally.add("actor/loss", 0.0)
        means = tally.means()
        assert (means["actor/cut"], means["actor/correction/cut"], means["actor/k3"]) == (0.5, 0.25, 0.125)
        assert (means["actor/loss"], means["actor/policy_loss/loss"]) == (pytest.approx(1.0), 9.0)
        assert (means["actor/ratio"], means["actor/policy_loss/ratio"]) == (pytest.approx(np.exp(0.1), rel=1e-5), 7.0)

    def test_several_corrections_multiply_and_are_told_apart(self) -> None:
        """One of five tokens with these ratios is kept, and weighs 1; all five stay in the denominator."""
        ratios = torch.tensor([4.0, 0.25, 1.0, 2.0, 1.5])
        zeros, segments = torch.zeros(5), torch.tensor([0, 0, 1, 1, 1])
        mask = torch.ones(5, dtype=torch.bool)
        x = LossInputs(ratios.log(), ratios.log(), zeros, mask, segments, behaviour_logprobs=zeros)
        parts = [
            HERE.reference("correction", "tis"),
            HERE.reference("correction", "divergence_mask", {"threshold": 0.2}),  # means of k3: 1.125 and 0.134
            HERE.reference("correction", "divergence_mask", {"level": "token", "threshold": 0.05}),
        ]
        objective, tally = bind(constant, correction=ComponentRef.combined(parts)), MetricAccumulator()
        found = objective(x, Totals(5, 2), tally)
        assert found.item() == pytest.approx(1.0 / 5)  # the third token: 1 · 1 · 1
        tally.add("actor/loss", 0.0)
        means = tally.means()
        names = ("correction", "correction/tis", "correction/divergence_mask", "correction/divergence_mask_2")
        assert [means[f"actor/{name}"] for name in names] == pytest.approx([0.2, 6.75 / 5, 0.6, 0.2])
        assert [means[f"actor/{name}/cut"] for name in names[1:]] == pytest.approx([0.2, 0.4, 0.8])
        assert "actor/cut" not in means
        single, alone = bind(constant, correction=parts[0]), MetricAccumulator()
        assert single(x, Totals(5, 2), alone).item() == pytest.approx(6.75 / 5)
        assert {"actor/correction", "actor/cut", "actor/k3"} < set(alone.means())

    def test_one_of_several_corrections_that_fails_is_named(self) -> None:
        @correction("opposite")
        def opposite(x: LossInputs) -> torch.Tensor:
            return torch.full_like(x.advantages, -1.0)

        zeros, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
        x = LossInputs(zeros, zeros, zeros, mask, torch.tensor([0, 1]), behaviour_logprobs=zeros)
        twice = [HERE.reference("correction", opposite), HERE.reference("correction", opposite)]
        objective = bind(constant, correction=ComponentRef.combined(twice))
        with pytest.raises(LearnerError, match=r"correction .*opposite' returned the weight -1; expected 0 or more"):
            objective(x, Totals(2, 2), MetricAccumulator())

    def test_a_metric_with_a_value_per_rollout_counts_each_rollout_once_whatever_its_length(
        self, make_batch: Make
    ) -> None:
        @policy_loss("ranked")
        def ranked(x: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
            tokens = torch.bincount(x.segments).double()
            return x.logprobs * 0, {"length": tokens, "length_max": tokens, "long": tokens > 6, "none": tokens[:0]}

        objective, tally, lengths = bind(ranked), MetricAccumulator(), np.zeros(0)
        for batch in (make_batch(5), make_batch(2)):
            objective(objective.inputs(batch, logprobs_of(batch), None, moment(batch)), moment(batch).totals, tally)
            lengths = np.append(lengths, batch.responses)
        means = tally.means()
        assert means["actor/length"] == pytest.approx(lengths.mean())
        assert means["actor/long"] == pytest.approx((lengths > 6).mean())
        assert means["actor/length_max"] == lengths.max()
        assert "actor/none" not in means

    @pytest.mark.parametrize("field", ["logprobs", "advantages", "loss_mask", "whole.advantages"])
    def test_a_loss_that_changes_its_inputs_in_place_is_refused(self, make_batch: Make, field: str) -> None:
        @policy_loss("careless", whole_batch=True)
        def careless(x: LossInputs) -> torch.Tensor:
            held = x.whole if field.startswith("whole.") else x
            values = getattr(held, field.removeprefix("whole."))
            values.zero_()
            return -x.advantages * x.logprobs

        batch, objective = make_batch(5), bind(careless)
        now = logprobs_of(batch) * 1  # a result of a model, not a leaf
        whole = objective.inputs(batch, now.detach(), None, moment(batch))
        inputs = objective.inputs(batch, now, None, moment(batch, whole=whole))
        with pytest.raises(LearnerError, match=rf"policy_loss 'careless' changed x\.{field} in place.*\.clone\(\)"):
            objective(inputs, moment(batch).totals, MetricAccumulator())

    def test_a_token_that_is_not_trained_on_leaves_the_gradient_of_the_kl_a_number(self, make_batch: Make) -> None:
        batch = make_batch(5)
        untrained = np.flatnonzero(~batch.loss_mask)
        now = batch.tokens["old_logprobs"].copy()
        now[untrained] = -100.0  # an observation that the policy rules out, and the reference does not
        objective = bind(constant, kl=HERE.reference("kl", "k3"), kl_coef=1.0)

        def gradient(values: np.ndarray) -> torch.Tensor:
            logprobs = torch.from_numpy(np.array(values)).requires_grad_()
            inputs = objective.inputs(batch, logprobs, None, moment(batch))
            return torch.autograd.grad(objective(inputs, moment(batch).totals, MetricAccumulator()), logprobs)[0]

        found = gradient(now)
        assert len(untrained) and not found[torch.from_numpy(untrained)].any()
        assert found.tolist() == gradient(batch.tokens["old_logprobs"]).tolist()

    def test_a_weight_that_is_no_number_where_nothing_is_trained_changes_nothing(self, make_batch: Make) -> None:
        @correction("careless")
        def careless(x: LossInputs) -> torch.Tensor:
            return torch.where(x.loss_mask, 1.0, torch.nan)

        batch = make_batch(5)
        objective = bind(load("policy_loss", "sft"), correction=HERE.reference("correction", careless))
        logprobs = logprobs_of(batch)
        inputs = objective.inputs(batch, logprobs, None, moment(batch))
        loss = objective(inputs, moment(batch).totals, MetricAccumulator())
        assert bool(torch.autograd.grad(loss, logprobs)[0].isfinite().all())

    def test_a_weight_below_zero_is_refused_where_a_token_is_trained(self, make_batch: Make) -> None:
        @correction("opposite")
        def opposite(x: LossInputs, *, on: bool = True) -> torch.Tensor:
            return torch.where(x.loss_mask == on, -0.25, 1.0)

        batch = make_batch(5)
        for on in (True, False):
            reference = HERE.reference("correction", opposite, {"on": on})
            objective = bind(load("policy_loss", "sft"), correction=reference)
            inputs = objective.inputs(batch, logprobs_of(batch), None, moment(batch))
            if on:
                with pytest.raises(LearnerError, match=r"correction .*opposite' returned the weight -0.25; expected 0"):
                    objective(inputs, moment(batch).totals, MetricAccumulator())
            else:
                objective(inputs, moment(batch).totals, MetricAccumulator())

    def test_metrics_of_the_gap_keep_their_digits(self, make_batch: Make) -> None:
        batch, tally = make_batch(5), MetricAccumulator()
        old = (batch.tokens["old_logprobs"] * 0).astype(np.float32)
        batch = batch.with_tokens(old_logprobs=old, behaviour_logprobs=old)
        now = torch.full((len(old),), 1e-4).requires_grad_()
        objective = bind(constant)
        objective(objective.inputs(batch, now, None, moment(batch)), moment(batch).totals, tally)
        for name in ("actor/kl_to_old", "actor/kl_to_behaviour"):
            assert tally.means()[name] == pytest.approx(5e-9, rel=1e-3)

    def test_a_token_that_the_engine_ruled_out_leaves_metrics_numbers(self, make_batch: Make) -> None:
        batch, tally = make_batch(5), MetricAccumulator()
        sampled = batch.tokens["behaviour_logprobs"].copy()
        sampled[np.flatnonzero(batch.loss_mask)[0]] = -np.inf
        batch = batch.with_tokens(behaviour_logprobs=sampled)
        objective = bind(constant)
        objective(objective.inputs(batch, logprobs_of(batch), None, moment(batch)), moment(batch).totals, tally)
        assert np.isfinite(tally.means()["actor/kl_to_behaviour"])

    def test_a_component_reads_what_it_declared(self, make_batch: Make) -> None:
        batch = make_batch(4)
        objective = bind(reads_too_much)
        with pytest.raises(
            MissingFieldError, match=r"^policy_loss .*: .*ref_logprobs was not computed.*py, line \d+\)$"
        ):
            objective(
                objective.inputs(batch, logprobs_of(batch), None, moment(batch)),
                moment(batch).totals,
                MetricAccumulator(),
            )

    def test_losses_are_told_the_time_whatever_they_declare(self, make_batch: Make) -> None:
        batch = make_batch(4)
        objective = bind(constant, train_steps=9)
        when = moment(batch, update=1, updates=2, train_step=7, updates_done=15)
        x = objective.inputs(batch, logprobs_of(batch), None, when).only(())
        assert (x.step, x.of_steps, x.train_step, x.train_steps, x.update) == (1, 2, 7, 9, 15)

    def test_an_experts_tokens_count_in_no_comparison_with_the_policy_that_sampled(self, make_batch: Make) -> None:
        by_expert = np.array([False, True, False, True, False])
        batch = make_batch(5, expert=by_expert)
        theirs = np.repeat(by_expert, batch.responses)
        now = torch.from_numpy(batch.tokens["old_logprobs"] + np.where(theirs, 2.0, 0.1).astype(np.float32))
        objective = Objective(LossSpec(policy_loss=HERE.reference("policy_loss", "mix")))
        tally, at = MetricAccumulator(), moment(batch)
        objective(objective.inputs(batch, now.requires_grad_(), None, at), at.totals, tally)
        tally.add("actor/loss", 0.0)
        means = tally.means()
        assert means["actor/ratio"] == pytest.approx(np.exp(0.1), rel=1e-5)
        assert means["actor/ratio_max"] == pytest.approx(np.exp(0.1), rel=1e-5)
        assert means["actor/kl_to_old"] == pytest.approx(np.exp(0.1) - 1.1, rel=1e-4)
        behind = batch.tokens["behaviour_logprobs"]
        gap = (now.detach().numpy() - behind)[batch.loss_mask & ~theirs].astype(float)
        assert means["actor/kl_to_behaviour"] == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-4)

    @pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
    def test_mix_weighs_the_experts_part_as_the_aggregation_divides(self, make_batch: Make, aggregate: str) -> None:
        batch = make_batch(6, expert=np.array([True, False, True, False, False, False]))
        objective = Objective(
            LossSpec(policy_loss=HERE.reference("policy_loss", "mix", {"mu": 1.0}), aggregate=aggregate)
        )
        now = logprobs_of(batch)
        found = objective(objective.inputs(batch, now, None, moment(batch)), moment(batch).totals, MetricAccumulator())
        ends = np.cumsum(batch.responses)
        losses = [-now.detach().numpy()[end - n : end][batch.loss_mask[end - n : end]]
                  for end, n, expert in zip(ends, batch.responses, batch.rollouts["expert"], strict=True)
                  if expert]  # fmt: skip
        losses = [loss for loss in losses if len(loss)]  # a rollout that is not trained counts nowhere
        by_hand = {
            "token-mean": np.concatenate(losses).mean(),
            "seq-mean-token-mean": np.mean([loss.mean() for loss in losses]),
            "seq-mean-token-sum": np.mean([loss.sum() for loss in losses]),
        }
        assert found.item() == pytest.approx(by_hand[aggregate], rel=1e-5)

    def test_a_mean_is_refused(self, make_batch: Make) -> None:
        batch = make_batch(4)
        objective = bind(a_mean)
        with pytest.raises(
            LearnerError, match=r"policy_loss 'mean' returned shape \(\); expected \(\d+,\), one value per token"
        ):
            objective(
                objective.inputs(batch, logprobs_of(batch), None, moment(batch)),
                moment(batch).totals,
                MetricAccumulator(),
            )

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (lambda x: 1 / 0, r"failed: ZeroDivisionError: division by zero \(.*test_parts\.py, line \d+\)"),
            (lambda x: (-x.logprobs, {"text": "x"}), "failed: ValueError: could not convert string to float"),
            (lambda x: sys.exit(3), r"failed: SystemExit: 3 \(.*test_parts\.py, line \d+\)"),
            (lambda x: [0.0], r"returned a list; expected \(\d+,\), one value per token"),
        ],
    )
    def test_a_loss_that_fails_is_named(self, make_batch: Make, given: Any, said: str) -> None:
        @rlsdk.policy_loss("broken")
        def broken(x: rlsdk.LossInputs) -> Any:
            return given(x)

        batch, objective = make_batch(4), bind(constant)
        objective._loss = rlsdk.load("policy_loss", broken)
        x = objective.inputs(batch, logprobs_of(batch), None, moment(batch))
        with pytest.raises(LearnerError, match=f"policy_loss 'broken' {said}"):
            objective(x, moment(batch).totals, MetricAccumulator())

    @pytest.mark.parametrize("given", [lambda x: -x.logprobs.detach(), lambda x: x.advantages.long() + 1])
    def test_a_loss_without_a_gradient_is_named(self, make_batch: Make, given: Any) -> None:
        @rlsdk.policy_loss("detached")
        def detached(x: rlsdk.LossInputs) -> torch.Tensor:
            return given(x)

        batch, objective = make_batch(4), bind(constant)
        objective._loss = rlsdk.load("policy_loss", detached)
        x = objective.inputs(batch, logprobs_of(batch).requires_grad_(), None, moment(batch))
        said = r"policy_loss '.*' returned values without a gradient, .*; see .*detached \(.*test_parts.py, line \d+\)"
        with pytest.raises(LearnerError, match=said):
            objective(x, moment(batch).totals, MetricAccumulator())

    def test_a_loss_that_is_zero_everywhere_has_a_gradient_of_zero(self, make_batch: Make) -> None:
        @rlsdk.policy_loss("nothing")
        def nothing(x: rlsdk.LossInputs) -> torch.Tensor:
            return torch.zeros_like(x.logprobs)

        batch, objective = make_batch(4), bind(constant)
        objective._loss = rlsdk.load("policy_loss", nothing)
        logprobs = logprobs_of(batch).requires_grad_()
        x = objective.inputs(batch, logprobs, None, moment(batch))
        (slope,) = torch.autograd.grad(objective(x, moment(batch).totals, MetricAccumulator()), logprobs)
        assert not slope.any()

    def test_a_loss_that_changes_settings_of_the_process_is_named_once_and_they_are_changed_back(
        self, make_batch: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        @rlsdk.policy_loss("careless")
        def careless(x: rlsdk.LossInputs) -> torch.Tensor:
            losses = -x.logprobs
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            return losses

        batch, objective = make_batch(4), bind(constant)
        objective._loss = rlsdk.load("policy_loss", careless)
        for _ in range(2):
            x = objective.inputs(batch, logprobs_of(batch), None, moment(batch))
            objective(x, moment(batch).totals, MetricAccumulator())
            assert torch.zeros(1).dtype == torch.float32 and torch.is_grad_enabled()
        (said,) = [record.getMessage() for record in caplog.records]
        assert re.fullmatch(
            r"policy_loss 'careless' changes settings of the whole process: torch's default dtype, from torch.float32 "
            r"to torch.float64; torch's recording of gradients, from on to off; they are changed back after each call; "
            r"see .*careless \(.*test_parts.py, line \d+\)",
            said,
        )

    def test_an_estimator_that_gives_a_mean_is_named(self, make_batch: Make) -> None:
        @rlsdk.kl("mean")
        def mean(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
            return (logprobs - ref_logprobs).mean()

        batch, objective = make_batch(4), bind(constant)
        objective._kl = rlsdk.load("kl", mean)
        now = logprobs_of(batch)
        x = objective.inputs(batch, now, None, moment(batch)).replace(ref_logprobs=now.detach())
        with pytest.raises(LearnerError, match=r"kl 'mean' returned shape \(\); expected \(\d+,\)"):
            objective(x, moment(batch).totals, MetricAccumulator())

    def test_kl_without_an_estimator(self) -> None:
        with pytest.raises(LearnerError, match="name one, such as kl: k3"):
            bind(constant, kl_coef=0.1)

    def test_who_needs_the_reference(self) -> None:
        plain = LossSpec(policy_loss=HERE.reference("policy_loss", constant))
        assert not needs_reference(plain)
        assert needs_reference(LossSpec(policy_loss=plain.policy_loss, kl=HERE.reference("kl", "k3"), kl_coef=0.1))

    def test_random_choices_depend_on_the_seed_alone(self, make_batch: Make) -> None:
        batch = make_batch(4)
        objective = bind(constant)
        draws = [
            torch.rand(3, generator=objective.inputs(part, logprobs_of(part), None, moment(batch, seed=seed)).generator)
            for part, seed in ((batch, 1), (batch.select(np.array([2])), 1), (batch, 2))
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])

    def test_the_clipped_value_loss(self) -> None:
        values = torch.tensor([1.0, 1.0, 0.2], requires_grad=True)
        old, returns = torch.zeros(3), torch.tensor([2.0, 0.0, 0.0])
        found = value_loss(values, old, returns, 0.5)
        assert found.tolist() == pytest.approx([0.5 * 1.5**2, 0.5, 0.02])
        assert value_loss(values, None, returns, None).tolist() == pytest.approx([0.5, 0.5, 0.02])
        assert torch.autograd.grad(found.sum(), values)[0].tolist() == pytest.approx([0.0, 1.0, 0.2])

    def test_a_critic_without_returns(self, make_batch: Make) -> None:
        batch = make_batch(3).with_tokens()
        batch.tokens.pop("returns")  # type: ignore[attr-defined]
        with pytest.raises(LearnerError, match="the critic needs returns"):
            critic_loss(batch, torch.zeros(len(batch.loss_mask)), None, Totals(1, 1), MetricAccumulator())


class TestTally:
    def test_parts_add_up(self) -> None:
        whole, left, right = MetricAccumulator(), MetricAccumulator(), MetricAccumulator()
        values, mask = torch.arange(6.0), torch.tensor([True, False, True, True, False, True])
        whole.add_tokens("x", values, mask)
        whole.add_tokens("x_max", values, mask)
        whole.add_tokens("x_min", values, mask)
        for part, rows in ((left, slice(0, 1)), (right, slice(1, 6))):
            for name in ("x", "x_max", "x_min"):
                part.add_tokens(name, values[rows], mask[rows])
        left.merge(right.pairs)
        assert left.means() == whole.means() == {"x": 2.5, "x_max": 5.0, "x_min": 0.0}

    def test_nothing_trained_adds_nothing(self) -> None:
        tally = MetricAccumulator()
        tally.add_tokens("x_max", torch.ones(2), torch.zeros(2, dtype=torch.bool))
        assert tally.means() == {}


def rate(schedule: Any, warmup_steps: int, final_ratio: float, total: int, **options: Any) -> Callable[[int], float]:
    """Share of the peak learning rate after a number of optimiser steps."""
    given = {"warmup_steps": warmup_steps, "final_ratio": final_ratio, **options}
    factor: Callable[[int], float] = rlsdk.load("learner", "deepspeed", schedule=schedule, **given).rate_factor(total)
    return factor


@rlsdk.lr_schedule("restarts")
def restarts(step: int, steps: int, *, cycles: int = 2) -> float:
    """From 1 to 0 in each cycle."""
    return 1 - step * cycles / steps % 1


class TestSchedule:
    @pytest.mark.parametrize(
        ("kind", "expected"), [("constant", [1, 1, 1]), ("linear", [1, 0.6, 0.2]), ("cosine", [1, 0.6, 0.2])]
    )
    def test_after_the_warm_up(self, kind: Any, expected: list[float]) -> None:
        factor = rate(kind, 4, 0.2, 14)
        assert [factor(k) for k in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
        assert [factor(k) for k in (4, 9, 14)] == pytest.approx(expected)
        assert factor(1000) == pytest.approx(expected[-1])

    def test_without_a_warm_up(self) -> None:
        assert rate("linear", 0, 0.0, 10)(0) == 1.0

    @pytest.mark.parametrize("kind", ["linear", "cosine", "polynomial"])
    def test_a_decay_of_its_own_length_ends_before_the_run(self, kind: Any) -> None:
        power = {"decay_power": 2.0} if kind == "polynomial" else {}
        factor = rate(kind, 4, 0.2, 1000, decay_steps=10, **power)
        middle = 0.2 + 0.8 * 0.25 if kind == "polynomial" else 0.6
        assert [factor(k) for k in (3, 4, 9, 14, 999)] == pytest.approx([1, 1, middle, 0.2, 0.2])

    @pytest.mark.parametrize(("shape", "middle"), [("linear", 0.6), ("cosine", 0.6), ("sqrt", 1 - 0.8 * 0.5**0.5)])
    def test_wsd_decays_in_the_last_steps(self, shape: Any, middle: float) -> None:
        factor = rate("wsd", 4, 0.2, 100, decay_steps=10, decay_shape=shape)
        assert [factor(k) for k in (0, 3, 50, 90, 95, 100)] == pytest.approx([0.25, 1, 1, 1, middle, 0.2])
        assert factor(99) < factor(98)

    def test_wsd_decays_in_the_last_tenth_by_default_and_never_before_the_end_of_the_warm_up(self) -> None:
        assert [rate("wsd", 0, 0.0, 40)(k) for k in (36, 38, 40)] == pytest.approx([1, 0.5, 0])
        short = rate("wsd", 4, 0.0, 8, decay_steps=100)
        assert [short(k) for k in (0, 3, 4, 6, 8)] == pytest.approx([0.25, 1, 1, 0.5, 0])

    def test_inverse_square_root_halves_the_rate_over_four_times_the_steps_down_to_the_final_one(self) -> None:
        factor = rate("inverse_sqrt", 4, 0.25, 100)
        assert [factor(k) for k in (0, 3, 4, 15, 63, 99)] == pytest.approx([0.25, 1, (4 / 5) ** 0.5, 0.5, 0.25, 0.25])
        assert [rate("inverse_sqrt", 0, 0.0, 100)(k) for k in (0, 3)] == [1, 0.5]

    def test_one_of_a_plugin_counts_the_steps_after_the_warm_up_and_has_its_own_options(self) -> None:
        factor = rate({"use": restarts, "cycles": 4}, 4, 0.1, 20)
        assert [factor(k) for k in (0, 3, 4, 6, 8, 18, 19)] == pytest.approx([0.25, 1, 1, 0.5, 1, 0.5, 0.25])

    @pytest.mark.parametrize("value", [-0.5, math.nan, "half", None])
    def test_a_value_that_is_no_share_is_an_error_that_names_the_schedule_and_the_step(self, value: Any) -> None:
        @rlsdk.lr_schedule("odd")
        def odd(step: int, steps: int) -> Any:
            return value if step == 3 else 1.0

        factor = rate(odd, 2, 0.1, 10)
        assert factor(4) == 1.0
        with pytest.raises(LearnerError, match=r"lr_schedule 'odd' returned .* for step 3 of 8; expected the share"):
            factor(5)

    def test_options_of_a_built_in_one_are_the_learners_unless_it_has_its_own(self) -> None:
        given = {"use": "wsd", "decay_steps": 10, "decay_shape": "sqrt", "final_ratio": 0.2}
        own = rate(given, 4, 0.1, 100)
        flat = rate("wsd", 4, 0.2, 100, decay_steps=10, decay_shape="sqrt")
        assert [own(k) for k in range(101)] == [flat(k) for k in range(101)]
        with pytest.raises(OptionError, match=r"schedule.decay_steps: given twice: learner.decay_steps is the"):
            rate(given, 4, 0.1, 100, decay_steps=5)
        with pytest.raises(OptionError, match=r"schedule.final_ratio: given twice: learner.final_ratio is the same"):
            rate(given, 4, 0.3, 100)
        with pytest.raises(OptionError, match=r"schedule.cycle: unknown option 'cycle', did you mean 'cycles'"):
            rate({"use": restarts, "cycle": 5}, 0, 0.1, 10)

    def test_settings_of_another_schedule_are_refused(self) -> None:
        load = partial(rlsdk.load, "learner", "deepspeed")
        for options, told in (
            (
                {"decay_steps": 5},
                "decay_steps belongs to schedule: linear or cosine or polynomial or wsd; got schedule",
            ),
            ({"schedule": "linear", "decay_power": 2.0}, "decay_power belongs to schedule: polynomial"),
            ({"schedule": "cosine", "decay_shape": "sqrt"}, "decay_shape belongs to schedule: wsd; got schedule: cosi"),
        ):
            with pytest.raises(OptionError, match=told):
                load(**options)
        load(schedule="wsd", decay_steps=5, decay_shape="sqrt", warmup_steps=2)


class Queue:
    """A GPU's queue in seconds of its own: work is queued at once, and done one after another."""

    def __init__(self) -> None:
        self.end = 0.0
        self.waits = 0

    def event(self) -> QueueEvent:
        return QueueEvent(self)


class QueueEvent:
    def __init__(self, queue: Queue) -> None:
        self._queue, self._reached = queue, 0.0

    def record(self) -> None:
        self._reached = self._queue.end

    def synchronize(self) -> None:
        self._queue.waits += 1

    def elapsed_time(self, later: QueueEvent) -> float:
        return 1000 * (later._reached - self._reached)


class TestPhaseTimer:
    def test_a_phase_lasts_as_long_as_the_work_that_it_queued_and_nothing_waits_for_it(self) -> None:
        timer, gpu = PhaseTimer(), Queue()
        timer.event = gpu.event
        for name, seconds in (("forward_seconds", 2.0), ("update_seconds", 5.0), ("forward_seconds", 3.0)):
            with timer(name):
                gpu.end += seconds
            gpu.end += 1.0  # of no phase
        assert not gpu.waits
        assert timer.seconds == {"forward_seconds": 5.0, "update_seconds": 5.0}
        with timer("update_seconds"):
            gpu.end += 1.0
        assert timer.seconds["update_seconds"] == 6.0
        assert gpu.waits == 4

    def test_a_phase_that_fails_on_a_gpu_is_not_timed_and_keeps_its_error(self) -> None:
        timer, gpu = PhaseTimer(), Queue()
        timer.event = gpu.event
        with pytest.raises(MemoryError), timer("update_seconds"):
            raise MemoryError
        assert timer.seconds["update_seconds"] == 0.0

    def test_a_phase_without_a_queue_is_measured_by_the_clock(self) -> None:
        timer = PhaseTimer()
        with timer("update_seconds"):
            time.sleep(0.02)
        assert timer.seconds["update_seconds"] >= 0.02 > timer.seconds["forward_seconds"]

    def test_a_learner_on_a_gpu_times_its_queue(self, tied: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: Any) -> None:
            raise InterruptedError

        monkeypatch.setattr(Ranks, "join", stop)
        for device in ("cpu", "cuda"):
            learner = load("learner", "deepspeed")
            with patch.dict(os.environ), pytest.raises(InterruptedError):
                learner.start(
                    Roles(actor=tied), LossSpec(policy_loss=None), ActorSpec(role="learner", device=device), 1
                )
            event = learner._clock.event
            assert (
                event is None
                if device == "cpu"
                else (event.func, event.keywords)
                == (
                    torch.cuda.Event,
                    {"enable_timing": True},
                )
            )


@pytest.mark.parametrize(("device", "copies"), [("cpu", False), ("cuda", True)])
def test_a_learner_on_a_gpu_copies_heads_where_its_kernels_need_it(device: Any, copies: bool) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    policy = PolicyModel(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), exact=False, router_loss=0.0
    )
    learner = load("learner", "deepspeed")
    learner._place = ActorSpec(role="learner", device=device)
    learner._passes = MicroBatchRunner(Ranks(0, 1, "cpu"), PhaseTimer(), "padded", 100, 32)
    learner._prepare(policy, Model(path=""))
    assert (policy.model.config._attn_implementation != "sdpa") == copies


class TestAllocator:
    """Pinned memory is not rounded up, unless users have settings of their own."""

    def settings(self, device: Any) -> str | None:
        return (
            load("learner", "deepspeed").environment(ActorSpec(role="learner", device=device)).get("PYTORCH_ALLOC_CONF")
        )

    def test_has_a_setting_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        setting = self.settings("cuda")
        assert setting is not None and self.settings("cpu") is None
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        assert setting.partition(":")[0].encode() in library.read_bytes()  # torch refuses names that it does not know

    def test_keeps_the_users_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        assert self.settings("cuda") is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_learner_on_a_gpu_does_without_attention_that_is_compiled_for_each_length(
    device: Any, tied: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(Ranks, "join", stop)
    place = ActorSpec(role="learner", device=device)
    torch.backends.cuda.enable_cudnn_sdp(True)  # other tests may have started such a learner
    try:
        with patch.dict(os.environ), pytest.raises(InterruptedError):
            load("learner", "deepspeed").start(Roles(actor=tied), LossSpec(policy_loss=None), place, 1)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (device == "cpu")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


class TestShards:
    def write(self, folder: Path) -> None:
        (folder / "actor").mkdir(parents=True)
        for name in ("actor/a.pt", "actor/b.pt", "c.pt"):
            (folder / name).write_text(name)
        for rank in range(2):
            write_manifest(folder, rank, 2, {"stage": 1})

    def check(self, folder: Path) -> list[str]:
        return [check_manifest(folder, rank, 2, {"stage": 1}) for rank in range(2)]

    def test_what_was_written_passes(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        assert self.check(tmp_path) == ["", ""]

    def test_a_changed_file_is_found(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "actor/b.pt").write_text("other")
        assert [bool(fault) for fault in self.check(tmp_path)].count(True) == 1

    def test_missing_and_added_files_are_found(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "c.pt").rename(tmp_path / "d.pt")
        for fault in self.check(tmp_path):
            assert fault == "missing ['c.pt'], not in the manifest ['d.pt']"

    def test_one_process_finds_what_any_rank_would(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        assert find_damage(tmp_path) == ""
        (tmp_path / "actor/b.pt").write_text("other")
        assert find_damage(tmp_path) == "changed since they were written: actor/b.pt"
        (tmp_path / "c.pt").unlink()
        assert "missing ['c.pt']" in find_damage(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [
            "{}",
            "null",
            "[]",
            '{"world": 2, "facts": {}, "files": null}',
            '{"world": true, "facts": {}, "files": {}}',
            '{"world": 2, "facts": {}, "files": {"c.pt": 1}}',
        ],
    )
    def test_a_manifest_of_wrong_shape_is_named_with_its_file(self, tmp_path: Path, content: str) -> None:
        self.write(tmp_path)
        file = tmp_path / "manifest-0.json"
        file.write_text(content)
        for check in (lambda: self.check(tmp_path), lambda: find_damage(tmp_path)):
            with pytest.raises(CheckpointError, match=f"{file} is not a manifest: expected .*files"):
                check()

    @pytest.mark.parametrize("world", [1, 3])
    def test_other_ranks_check_every_file_where_they_may(self, world: int, tmp_path: Path) -> None:
        self.write(tmp_path)

        def check() -> list[str]:
            facts = {"stage": 1}
            return [check_manifest(tmp_path, rank, world, facts, same_ranks=False) for rank in range(world)]

        assert check() == [""] * world
        for name in ("actor/a.pt", "actor/b.pt", "c.pt"):
            (tmp_path / name).write_text("other")
            assert name in "; ".join(check())
            (tmp_path / name).write_text(name)

    def test_other_set_ups_are_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        with pytest.raises(CheckpointError, match="ranks 2 there, 1 here; stage 1 there, 3 here"):
            check_manifest(tmp_path, 0, 1, {"stage": 3})
        check_manifest(tmp_path, 0, 2, {"stage": 1, "weight_decay_on": "all"})  # of a version without this setting
        with pytest.raises(CheckpointError, match="weight_decay_on 'all' there, 'matrices' here"):
            check_manifest(tmp_path, 0, 2, {"stage": 1, "weight_decay_on": "matrices"})
        (tmp_path / "manifest-1.json").write_text("{")
        with pytest.raises(CheckpointError, match="the manifest of rank 1 cannot be read"):
            check_manifest(tmp_path, 1, 2, {"stage": 1})


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"offload": "all"}, "needs zero_stage 3"),
            ({"offload": "optimizer", "zero_stage": 0}, "needs zero_stage 1 or more"),
            ({"zero_stage": 4}, "expected 0 | 1 | 2 | 3, got 4"),
            ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
            ({"schedule": "linea"}, "did you mean 'linear'"),
            ({"compile": True, "lora": {}}, "compile cannot be combined with"),
        ],
    )
    def test_faults_are_told_at_once(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message.replace("|", r"\|")):
            load("learner", "deepspeed", **options)

    @pytest.mark.parametrize(("dtype", "faults"), [(torch.float32, 1), (torch.bfloat16, 0)])
    def test_flash_attention_has_no_float32(self, tied: Model, dtype: torch.dtype, faults: int) -> None:
        net = AutoModelForCausalLM.from_pretrained(tied.path, dtype=dtype)
        found = load("learner", "deepspeed", attention="flash_attention_2").model_faults(net)
        assert sum("cannot compute in float32" in fault for fault in found) == faults
        assert not load("learner", "deepspeed").model_faults(net)

    def test_every_option_has_a_help_line(self) -> None:
        _, component = HERE.find("learner", "deepspeed")
        assert all(option.help for option in component.options)

    def test_the_environment_follows_the_place(self) -> None:
        learner = load("learner", "deepspeed")
        alone = learner.environment(ActorSpec(role="learner", threads=2, cpus=2, cache="/c"))
        assert alone["OMP_NUM_THREADS"] == "2"
        assert alone["DS_ACCELERATOR"] == "cpu"
        assert alone["TORCH_EXTENSIONS_DIR"] == "/c/extensions"
        assert "OMP_WAIT_POLICY" not in alone
        assert alone["TORCHDYNAMO_DISABLE"] == "1"
        compiling = load("learner", "deepspeed", compile=True).environment(ActorSpec(role="learner", threads=2, cpus=2))
        assert "TORCHDYNAMO_DISABLE" not in compiling
        crowded = learner.environment(ActorSpec(role="learner", rank=1, world_size=2, threads=2, cpus=2))
        assert (crowded["RANK"], crowded["WORLD_SIZE"], crowded["LOCAL_RANK"]) == ("1", "2", "1")
        assert crowded["OMP_WAIT_POLICY"] == "PASSIVE"
        assert learner.environment(ActorSpec(role="learner", rank=1, world_size=2, device="cuda"))["LOCAL_RANK"] == "0"


@pytest.mark.parametrize(
    ("options", "undecayed"),
    [({}, set()), ({"weight_decay_on": "matrices"}, {"norm.weight", "norm.bias", "proj.bias", "experts_bias"})],
)
def test_weight_decay_leaves_out_norms_and_biases_if_it_is_set_so(options: dict[str, Any], undecayed: set[str]) -> None:
    module = torch.nn.Module()
    module.norm, module.proj = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    module.experts_bias = torch.nn.Parameter(torch.zeros(2, 4))  # one bias for each expert
    module.experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
    module.frozen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    learner = HERE.resolve(HERE.reference("learner", "deepspeed", options))
    assert learner.undecayed(module) == undecayed
