"""The zoo's losses against plain loops written from the papers, values and gradients, and what they have in common.

The package need not be installed: what is marked stands where a name would.
"""

from __future__ import annotations

import math

import pytest
import torch
from rlsdk_zoo.experts import mix_chord
from rlsdk_zoo.sequence import kimi, vespo
from rlsdk_zoo.token import dppo, rec, sppo
from torch import Tensor

import rlsdk
from rlsdk.batch import AGGREGATIONS
from rlsdk.errors import MissingFieldError, OptionError
from rlsdk.kit import component_of

VARIANTS = [
    (sppo, {}),
    (rec, {}),
    (rec, {"clip": "none"}),
    (rec, {"clip": "two_side", "importance_sampling": True}),
    (rec, {"clip": "ring"}),
    (kimi, {}),
    (kimi, {"level": "token"}),
    (dppo, {}),
    (dppo, {"divergence": "kl"}),
    (vespo, {}),
    (mix_chord, {}),
]
IDS = [f"{loss.__name__}-{options}" for loss, options in VARIANTS]
every = pytest.mark.parametrize("loss, options", VARIANTS, ids=IDS)


def run(loss, x: rlsdk.LossInputs, **options) -> Tensor:
    result = rlsdk.load("policy_loss", loss, **options)(x)
    return result[0] if isinstance(result, tuple) else result


def uneven(loss: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, len(loss), dtype=loss.dtype)


def value_and_gradient(loss, x: rlsdk.LossInputs, **options) -> tuple[Tensor, Tensor]:
    """Loss `[t]`, zero where untrained, and the gradient of an uneven sum of it."""
    logprobs = x.logprobs.clone().requires_grad_()
    values = torch.where(x.loss_mask, run(loss, x.replace(logprobs=logprobs), **options), 0)
    (values * uneven(values)).sum().backward()
    return values.detach(), logprobs.grad


# References: from the trained tokens of one rollout, as scalars, to the loss of each.


def ref_sppo(eps):
    def loss(p, q, m, a):
        ratio = torch.exp(p - q)
        return -a * torch.log(torch.clamp(ratio, 1 / (1 + eps), 1 + eps))

    return per_token(loss)


def ref_rec(keeps, weighted=False):
    def loss(p, q, m, a):
        ratio = math.exp(p.item() - q)
        return -a * p * (ratio if weighted else 1.0) if keeps(ratio, a) else 0 * p

    return per_token(loss)


def one_side(low, high):
    return lambda ratio, a: not ((a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low))


def two_side(low, high):
    return lambda ratio, a: 1 - low <= ratio <= 1 + high


def ring(low, high, ring_low, ring_high):
    def keeps(ratio, a):
        far = (a > 0 and ratio <= 1 - ring_low) or (a < 0 and ratio >= 1 + ring_high)
        return 1 - low <= ratio <= 1 + high or far

    return keeps


def ref_dppo(divergence, delta):
    """Eq. 12: the mask is a constant of the update."""

    def loss(p, q, m, a):
        now, then = math.exp(p.item()), math.exp(m)
        d = abs(then - now)
        if divergence == "kl":
            d = then * math.log(then / now) + (1 - then) * math.log((1 - then) / (1 - now))
        ratio = torch.exp(p - m)
        blocked = d > delta and ((a > 0 and ratio > 1) or (a < 0 and ratio < 1))
        return 0 * p if blocked else -ratio * a

    return per_token(loss)


def ref_kimi(tau):
    """Eq. 3, each token carrying its share of the square of the sum."""

    def loss(tokens):
        whole = sum(p - q for p, q, _, _ in tokens)
        return [-a * p + tau / 2 * (p - q) * whole for p, q, _, a in tokens]

    return loss


def ref_kimi_token(tau):
    return per_token(lambda p, q, m, a: -a * p + tau / 2 * (p - q) ** 2)


def ref_vespo(pos, neg):
    """Eq. 20, the kernel being a constant of the update."""

    def loss(tokens):
        weight = math.prod(math.exp(p.item() - m) for p, _, m, _ in tokens)
        out = []
        for p, _, _, a in tokens:
            c1, c2 = pos if a >= 0 else neg
            out.append(-(weight**c1) * math.exp(c2 * (1 - weight)) * a * p)
        return out

    return loss


def per_token(rule):
    return lambda tokens: [rule(*token) for token in tokens]


CASES = [
    (sppo, {}, ref_sppo(0.3)),
    (sppo, {"clip": 0.1}, ref_sppo(0.1)),
    (rec, {}, ref_rec(one_side(0.2, 0.2))),
    (rec, {"importance_sampling": True, "clip_low": 0.1, "clip_high": 0.05}, ref_rec(one_side(0.1, 0.05), True)),
    (rec, {"clip": "none"}, ref_rec(lambda ratio, a: True)),
    (rec, {"clip": "two_side"}, ref_rec(two_side(0.2, 0.2))),
    (rec, {"clip": "ring", "ring_low": 0.3, "ring_high": 0.4}, ref_rec(ring(0.2, 0.2, 0.3, 0.4))),
    (kimi, {}, ref_kimi(0.1)),
    (kimi, {"tau": 2.0}, ref_kimi(2.0)),
    (kimi, {"tau": 2.0, "level": "token"}, ref_kimi_token(2.0)),
    (dppo, {}, ref_dppo("tv", 0.15)),
    (dppo, {"threshold": 0.05}, ref_dppo("tv", 0.05)),
    (dppo, {"divergence": "kl"}, ref_dppo("kl", 0.05)),
    (dppo, {"divergence": "kl", "threshold": 0.01}, ref_dppo("kl", 0.01)),
    (vespo, {}, ref_vespo((2.0, 3.0), (3.0, 2.0))),
    (vespo, {"power_pos": 1.0, "decay_neg": 0.5}, ref_vespo((1.0, 3.0), (3.0, 0.5))),
]


def reference(x: rlsdk.LossInputs, rule) -> tuple[Tensor, Tensor]:
    leaf = x.logprobs.clone().requires_grad_()
    values = [torch.zeros((), dtype=leaf.dtype)] * len(leaf)
    for i in range(int(x.segments.max()) + 1):
        places = [t for t in range(len(leaf)) if x.loss_mask[t] and int(x.segments[t]) == i]
        fields = (x.old_logprobs, x.behaviour_logprobs, x.advantages)
        tokens = [(leaf[t], *(float(f[t]) for f in fields)) for t in places]
        for t, value in zip(places, rule(tokens), strict=True):
            values[t] = value
    loss = torch.stack(values)
    (loss * uneven(loss)).sum().backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("loss, options, rule", CASES, ids=[f"{f.__name__}-{o}" for f, o, _ in CASES])
@pytest.mark.parametrize("seed", range(3))
def test_parity_of_values_and_gradients(make_loss, loss, options, rule, seed):
    x = make_loss(seed)
    found, expected = value_and_gradient(loss, x, **options), reference(x, rule)
    assert torch.allclose(found[0], expected[0], atol=1e-12)
    assert torch.allclose(found[1], expected[1], atol=1e-12)


@pytest.mark.parametrize("per, mode", [("token", "token-mean"), ("rollout", "seq-mean-token-mean")])
@pytest.mark.parametrize("seed", range(3))
def test_mix_chord_is_the_papers_objective(make_loss, per, mode, seed):
    """Eq. 3 with eq. 2 and 6, values and gradients; each part has its own denominator."""
    x = make_loss(seed)
    logp = x.logprobs.clone().requires_grad_()
    found = rlsdk.aggregate(run(mix_chord, x.replace(logprobs=logp), mu=0.3, per=per), x.loss_mask, x.segments, mode)
    found.backward()
    leaf, parts = x.logprobs.clone().requires_grad_(), {True: [], False: []}
    for i, expert in enumerate(x.expert.tolist()):
        tokens = []
        for t in ((x.segments == i) & x.loss_mask).nonzero()[:, 0].tolist():
            probability, ratio = math.exp(leaf[t].item()), torch.exp(leaf[t] - x.old_logprobs[t])
            imitated = -probability * (1 - probability) * leaf[t]
            surrogate = -torch.min(ratio * x.advantages[t], ratio.clamp(0.8, 1.2) * x.advantages[t])
            tokens.append(imitated if expert else surrogate)
        parts[expert] += tokens if per == "token" else [sum(tokens) / len(tokens)] if tokens else []
    expected = 0.7 * sum(parts[False]) / len(parts[False]) + 0.3 * sum(parts[True]) / len(parts[True])
    expected.backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert torch.allclose(logp.grad, leaf.grad, atol=1e-12)


def one_token(ratio: float, advantage: float, probability: float = 0.5) -> rlsdk.LossInputs:
    """A token that had `probability` when it was sampled and has `ratio` times as much."""
    p, q = (torch.tensor([math.log(v)]).double() for v in (probability * ratio, probability))
    mask, index, expert = torch.ones(1).bool(), torch.zeros(1).long(), torch.ones(1).bool()
    return rlsdk.LossInputs(p, q, torch.tensor([advantage]).double(), mask, index, expert=expert)


@pytest.mark.parametrize(
    "loss, options, ratio, advantage, expected",
    [
        (sppo, {}, 1.2, 2.0, -2 * math.log(1.2)),
        (sppo, {}, 1.5, 2.0, -2 * math.log(1.3)),  # clipped above
        (sppo, {}, 0.5, 2.0, 2 * math.log(1.3)),  # and below, for good tokens too
        (sppo, {}, 0.5, -2.0, -2 * math.log(1.3)),
        (rec, {}, 1.1, 3.0, -3 * math.log(0.55)),
        (rec, {}, 1.3, 3.0, 0.0),
        (rec, {}, 0.5, 3.0, -3 * math.log(0.25)),  # one side: a good token that became rare is kept
        (rec, {}, 1.5, -3.0, 3 * math.log(0.75)),
        (rec, {}, 0.7, -3.0, 0.0),
        (rec, {"clip": "two_side"}, 0.5, 3.0, 0.0),
        (rec, {"clip": "ring"}, 0.5, 3.0, 0.0),
        (rec, {"clip": "ring"}, 0.3, 3.0, -3 * math.log(0.15)),
        (rec, {"importance_sampling": True}, 1.1, 3.0, -3.3 * math.log(0.55)),
        (kimi, {"tau": 2.0}, 1.5, 3.0, -3 * math.log(0.75) + math.log(1.5) ** 2),
        (kimi, {"tau": 2.0, "level": "token"}, 1.5, 3.0, -3 * math.log(0.75) + math.log(1.5) ** 2),
        (dppo, {}, 1.2, 2.0, -2.4),  # 0.6 - 0.5 is within 0.15
        (dppo, {}, 1.4, 2.0, 0.0),
        (dppo, {}, 1.4, -2.0, 2.8),  # leads back
        (dppo, {}, 0.6, -2.0, 0.0),
        (dppo, {}, 0.6, 2.0, -1.2),
        (dppo, {"divergence": "kl"}, 1.2, 2.0, -2.4),  # 0.5·ln(0.5/0.6) + 0.5·ln(0.5/0.4) = 0.0204
        (dppo, {"divergence": "kl"}, 1.4, 2.0, 0.0),  # 0.0872
        (dppo, {"threshold": 0.3}, 1.4, 2.0, -2.8),
        (vespo, {}, 1.0, 2.0, -2 * math.log(0.5)),  # on-policy: 1
        (vespo, {}, 1.5, 2.0, -2 * 1.5**2 * math.exp(-1.5) * math.log(0.75)),
        (vespo, {}, 0.5, -2.0, 2 * 0.5**3 * math.exp(1.0) * math.log(0.25)),
        (mix_chord, {"mu": 1.0}, 1.0, 2.0, -0.25 * math.log(0.5)),
        (mix_chord, {"mu": 0.4}, 1.6, 2.0, -0.4 * 0.8 * 0.2 * math.log(0.8)),
    ],
)
def test_hand_computed(loss, options, ratio, advantage, expected):
    assert run(loss, one_token(ratio, advantage), **options).item() == pytest.approx(expected)


def test_dppo_lets_rare_tokens_move_where_ppo_stops_them():
    rare, likely = one_token(100.0, 1.0, probability=1e-5), one_token(0.81, -1.0, probability=0.99)
    assert run(dppo, rare).item() == pytest.approx(-100.0)
    assert run(dppo, likely).item() == 0.0
    assert rlsdk.load("policy_loss", "ppo", dual_clip=None)(rare)[0].item() == pytest.approx(-1.2)
    assert rlsdk.load("policy_loss", "ppo", dual_clip=None)(likely)[0].item() == pytest.approx(0.81)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_of_certain_tokens_is_finite(divergence):
    x = one_token(1.0, 1.0, probability=1.0)
    assert run(dppo, x, divergence=divergence).item() == -1.0
    less = x.replace(behaviour_logprobs=torch.tensor([math.log(0.5)]).double())
    loss, metrics = rlsdk.load("policy_loss", dppo, divergence=divergence)(less)
    assert loss.item() == 0.0  # from a half to certainty: beyond any threshold
    assert metrics["divergence"].isfinite()


def test_dppo_and_vespo_read_the_policy_that_sampled(make_loss):
    x = make_loss(1)
    for loss in (dppo, vespo):
        moved = x.replace(old_logprobs=x.old_logprobs - 1)
        assert torch.equal(run(loss, x)[x.loss_mask], run(loss, moved)[x.loss_mask])
        moved = x.replace(behaviour_logprobs=x.behaviour_logprobs - 1)
        assert not torch.equal(run(loss, x)[x.loss_mask], run(loss, moved)[x.loss_mask])


def test_kimi_adds_up_to_the_square_of_the_whole_answer():
    logp = torch.tensor([-1.0, -0.5, -0.25]).double().requires_grad_()
    old, zeros = torch.tensor([-1.5, -0.25, -1.0]).double(), torch.zeros(3).double()
    x = rlsdk.LossInputs(logp, old, zeros, torch.ones(3).bool(), torch.zeros(3).long())
    loss = run(kimi, x, tau=0.5)
    assert loss.sum().item() == pytest.approx(0.25 * 1.0**2)  # 0.5 - 0.25 + 0.75 = 1
    loss.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.5] * 3)


@every
def test_padded_planes_give_the_same(make_loss, loss, options):
    """Ragged rollouts with gaps in planes `[n, L]`, packed by rlsdk."""
    x = make_loss(2)
    fields = {k: x.to_padded(getattr(x, k)) for k in ("logprobs", "old_logprobs", "advantages", "behaviour_logprobs")}
    mask, lengths = x.to_padded(x.loss_mask), torch.bincount(x.segments)
    y = rlsdk.LossInputs.from_padded(**fields, mask=mask, lengths=lengths, expert=x.expert)
    assert torch.equal(run(loss, x, **options), run(loss, y, **options))


@every
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_add_up_to_the_whole(make_loss, loss, options, mode):
    x = make_loss(3, 10)
    totals = rlsdk.Totals.of(x.loss_mask, x.segments)

    def reduced(part):
        values = run(loss, part, **options)
        return rlsdk.aggregate(values, part.loss_mask, part.segments, mode, norm=7, totals=totals)

    logp = x.logprobs.clone().requires_grad_()
    whole = reduced(x.replace(logprobs=logp))
    whole.backward()
    pieces, parts = x.logprobs.clone().requires_grad_(), []
    for rows in ([0, 1], [2, 3, 4, 5], [6, 7, 8, 9]):
        chosen = (x.segments >= rows[0]) & (x.segments <= rows[-1])
        fields = ("old_logprobs", "advantages", "loss_mask", "behaviour_logprobs")
        tokens = {k: getattr(x, k)[chosen] for k in fields} | {"segments": x.segments[chosen] - rows[0]}
        extra = {"expert": x.expert[rows], "whole": x.detach(), "offset": int(chosen.nonzero()[0])}
        parts.append(reduced(rlsdk.LossInputs(pieces[chosen], **tokens, **extra)))
    sum(parts).backward()
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), abs=1e-10)
    assert torch.allclose(pieces.grad, logp.grad, atol=1e-12)


@every
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_where_nothing_is_trained_leaks_neither_value_nor_gradient(make_loss, loss, options, garbage):
    x = make_loss(5)
    fields = ("old_logprobs", "behaviour_logprobs", "advantages", "logprobs")
    dirty = x.replace(**{f: torch.where(x.loss_mask, getattr(x, f), garbage) for f in fields})
    clean, soiled = value_and_gradient(loss, x, **options), value_and_gradient(loss, dirty, **options)
    assert torch.equal(clean[0], soiled[0])
    assert torch.equal(clean[1], soiled[1])
    assert soiled[1][~x.loss_mask].count_nonzero() == 0


@every
def test_gradient_through_logprobs_alone(make_loss, loss, options):
    x = make_loss(6)
    fields = ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages")
    leaves = {f: getattr(x, f).clone().requires_grad_() for f in fields}
    run(loss, x.replace(**leaves), **options).sum().backward()
    assert leaves["logprobs"].grad.count_nonzero() > 0
    assert all(leaves[f].grad is None for f in fields[1:])


@every
def test_extreme_ratios_stay_finite(make_loss, loss, options):
    x = make_loss(7, dtype=torch.float32)
    for shift in (500.0, -500.0):
        values, gradient = value_and_gradient(loss, x.replace(logprobs=x.logprobs + shift), **options)
        assert values.isfinite().all()
        assert gradient.isfinite().all()


@every
def test_nothing_to_train(make_loss, loss, options):
    x = make_loss(0)
    values, gradient = value_and_gradient(loss, x.replace(loss_mask=torch.zeros_like(x.loss_mask)), **options)
    assert values.count_nonzero() == 0
    assert gradient.count_nonzero() == 0
    empty = {k: v[:0] for k, v in vars(x).items() if isinstance(v, Tensor)}
    assert len(run(loss, rlsdk.LossInputs(**empty), **options)) == 0


@every
def test_bfloat16_is_widened(make_loss, loss, options):
    values = run(loss, make_loss(0, dtype=torch.bfloat16), **options)
    assert values.dtype == torch.float32
    assert values.isfinite().all()


@every
def test_metrics_are_detached_numbers(make_loss, loss, options):
    x = make_loss(0)
    result = rlsdk.load("policy_loss", loss, **options)(x.replace(logprobs=x.logprobs.clone().requires_grad_()))
    for name, value in (result[1] if isinstance(result, tuple) else {}).items():
        if loss is mix_chord:  # of each trained token of the expert, or of the policy
            origin = x.expert[x.segments] == (name == "expert_loss")
            assert value.shape == (int((x.loss_mask & origin).sum()),)
        else:
            assert not value.dim()
        assert not value.requires_grad
        assert value.isfinite().all()


def test_only_mix_chord_reads_more_than_everyone_gets(make_loss):
    x = make_loss(0)
    for loss in (sppo, rec, kimi, dppo, vespo):
        run(loss, x.only(()))
    assert component_of(mix_chord).needs == ("expert",)
    assert component_of(mix_chord).whole_batch
    with pytest.raises(MissingFieldError, match="expert"):
        run(mix_chord, x.only(()))


def test_options_are_checked():
    with pytest.raises(OptionError, match="clip"):
        rlsdk.load("policy_loss", rec, clip="inside")
    with pytest.raises(OptionError, match="divergence"):
        rlsdk.load("policy_loss", dppo, divergence="js")
