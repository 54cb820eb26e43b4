"""Rates derived from a model's size and a data sheet, by hand-computed values, and the command's output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from rlsdk.cli.simulate import simulate as command
from rlsdk.config.rollout import RolloutSection
from rlsdk.contracts import Model
from rlsdk.conversion import without_weights
from rlsdk.errors import ConfigError
from rlsdk.simulation.prediction import divided
from rlsdk.simulation.rates import Hardware, Lengths, ModelSize, Rates, Work, derived
from rlsdk.simulation.training import Setup, simulate

ROOT = Path(__file__).parents[2]
NANO = ROOT / "examples" / "models" / "countdown-nano"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SHEET = Hardware(flops=1e12, memory=1e11, link=1e10, network=1e9, host=2e9, per_node=4, decode_overhead=0.0)
BILLION = ModelSize(parameters=1e9, active=1e9, width=2, cache=1e5)
STILL = Rates(
    prompt_tokens=0, score_seconds=0.0, learner_seconds=0.0, token_seconds=0.0, sync_seconds=0.0, weights_bytes=0.0
)


def with_config(folder: Path, **config: object) -> Path:
    """A folder with the nano model's tokenizer and another model's config, without weights."""
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_rates_of_a_dense_model() -> None:
    found = Rates(**derived(SHEET, BILLION, Work(updates=2, context=100.0)))
    assert found.step_seconds == pytest.approx(2e9 / 6e10)  # the weights, at 0.6 of the memory's bandwidth
    assert found.sequence_seconds == pytest.approx(2e9 / 5e11 + 1e7 / 6e10)
    assert found.prompt_rate == pytest.approx(5e11 / 2e9)
    assert found.token_seconds == pytest.approx(6e9 / 3.5e11)
    assert found.learner_seconds == pytest.approx(2 * 1.6e10 / 1e11)
    assert found.exchanged_bytes == pytest.approx(2 * 2 * 4e9)
    assert (found.weights_bytes, found.switch_seconds, found.engines_per_node) == (2e9, 0.0, 4)


def test_further_passes_and_shared_devices_cost_more() -> None:
    work = Work(trained=2, forward=3, passes=2, recomputes=True, gpus_per_engine=2, colocated=True)
    found = Rates(**derived(SHEET, BILLION, work))
    assert found.token_seconds == pytest.approx((8 * 2 * 2 + 2 * 3) * 1e9 / 3.5e11)
    assert found.step_seconds == pytest.approx(2e9 / 1.2e11)
    assert found.switch_seconds == pytest.approx((16e9 * 2 + 2e9) / 2e9)
    assert found.engines_per_node == 2


def test_an_optimiser_with_less_state_takes_less_time() -> None:
    found = Rates(**derived(SHEET, BILLION, Work(state_bytes=0.0, colocated=True)))
    assert found.learner_seconds == pytest.approx(8e9 / 1e11)
    assert found.switch_seconds == pytest.approx((8e9 + 2e9) / 2e9)


def test_the_size_of_a_model_comes_from_its_config(tmp_path: Path) -> None:
    folder = with_config(
        tmp_path / "moe", architectures=["MixtralForCausalLM"], model_type="mixtral", hidden_size=64,
        intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    size = ModelSize.of(without_weights(Model(path=str(folder))), 2)
    experts = 2 * 8 * 3 * 64 * 32
    attention = 2 * (2 * 64 * 64 + 2 * 64 * 32)
    others = 2 * 128 * 64 + attention + 2 * (8 * 64 + 2 * 64) + 64
    assert size.parameters == experts + others
    assert size.active == experts / 4 + others
    assert size.cache == 2 * 2 * 2 * 16 * 2


def test_a_model_of_states_alone_has_no_cache_per_token(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}
    folder = with_config(tmp_path / "mamba", architectures=["MambaForCausalLM"], model_type="mamba", **shape)
    assert ModelSize.of(without_weights(Model(path=str(folder))), 2).cache == 0


def test_copies_double_from_round_to_round_unless_nodes_pass_them_on() -> None:
    rates = Rates(weights_bytes=1e9, bandwidth=1e9, engines_per_node=8)
    assert [rates.transfer(n) for n in (1, 8, 9, 24, 25, 768)] == [1, 1, 2, 2, 3, 7]
    assert attrs.evolve(rates, relayed=True).transfer(768) == 1


def test_ranks_exchange_over_their_slowest_link() -> None:
    rates = attrs.evolve(STILL, exchanged_bytes=8e9, link=1e10, network=1e9, ranks_per_node=4)
    assert [rates.exchange(n) for n in (1, 2, 4, 8)] == pytest.approx([0, 0.4, 0.6, 7.0])
    assert rates.learn(0, 4) == pytest.approx(0.6)


@pytest.mark.parametrize(("workers", "seconds"), [(0, 1.0), (4, 0.5)])
def test_rollouts_wait_for_the_process_that_makes_them(workers: int, seconds: float) -> None:
    """Eight rollouts of 0.125 s each, by the driver alone or by four workers, and then 0.03125 s of the driver."""
    rates = attrs.evolve(STILL, step_seconds=1e-9, sequence_seconds=0.0, driver_seconds=0.125, ledger_seconds=0.03125)
    setup = Setup(rates=rates, lengths=Lengths(limit=1), engines=1, learners=1, batch=4, group=2, steps=4)
    rollout = attrs.evolve(setup.rollout, workers=workers)
    found = simulate(attrs.evolve(setup, rollout=rollout))
    # The last worker is done after 0.25 s; of the driver's four turns of 0.0625 s, none can begin before that.
    assert found.step == pytest.approx(seconds, abs=1e-3)


def test_engines_and_learner_that_take_turns_have_all_gpus() -> None:
    assert divided(8, 0.25, 2, colocated=True) == (4, 8)
    assert divided(8, 0.25, 2) == (3, 2)


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(command, list(arguments))
    return found.exit_code, found.stdout


def test_rates_say_where_they_come_from(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864}
    heads = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936}
    folder = with_config(tmp_path / "qwen", **qwen, **heads, tie_word_embeddings=True)
    model = ["model.path=" + str(folder), "model.dtype=bfloat16"]
    code, out = run(str(QUICKSTART), *model, "--gpus", "8", "--rate", "median=5", "--steps", "4", "--json")
    assert code == 0, out
    found = json.loads(out)
    assert found["rates"]["weights_bytes"] == 2 * 494_032_768
    assert found["predictions"][0]["engines"] == found["predictions"][0]["learners"] == 8  # they share the devices
    assert found["origins"]["step_seconds"] == "494,032,768 parameters on the data sheet of h100"
    assert found["origins"]["median"] == "--rate"
    assert found["origins"]["engines_per_node"] == found["origins"]["step_seconds"]  # also where it is the default
    _, plain = run(str(QUICKSTART), *model, "learner.optimizer=sgd", "--gpus", "8", "--steps", "4", "--json")
    assert json.loads(plain)["rates"]["learner_seconds"] == pytest.approx(found["rates"]["learner_seconds"] / 2)
    assert found["origins"]["efficiency"] == "assumed"
    code, out = run(str(QUICKSTART), "--steps", "4")
    assert code == 0
    assert "343,680 parameters on the data sheet of cpu" in out.replace("\n", " ")
    assert "No rate was measured" in out


def test_no_size_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its size is unknown and no prediction is possible"):
        CliRunner().invoke(command, [str(QUICKSTART), "model.path=lab/nowhere"], catch_exceptions=False)
    with pytest.raises(ConfigError, match=r"--hardware h10: unknown; .* did you mean 'h100'\?"):
        CliRunner().invoke(command, [str(QUICKSTART), "--hardware", "h10"], catch_exceptions=False)


def test_answers_that_a_sync_interrupts_cost_as_much_as_others() -> None:
    """At each sync, the four to eight rollouts of up to two batches are handed back and requested again."""
    rates = attrs.evolve(STILL, step_seconds=1.0, sequence_seconds=0.0)
    setup = Setup(
        rates=rates, lengths=Lengths(limit=100, seen=(40,)), engines=1, learners=1, batch=2, group=2, steps=8
    )  # fmt: skip

    def costs(*, in_flight: bool) -> float:
        rollout = RolloutSection(max_staleness=1, in_flight=in_flight)
        each = (attrs.evolve(rates, driver_seconds=seconds) for seconds in (0.0, 0.125))
        free, busy = (simulate(attrs.evolve(setup, rates=one, rollout=rollout)).step for one in each)
        return busy - free

    assert 4 * 0.125 <= costs(in_flight=False) - costs(in_flight=True) <= 8 * 0.125
