"""Settings that Python files compute or pass on in functions of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.migration import migrate
from tests.migration.test_counterparts import todo

IN_A_FUNCTION = """
def reward(completions, **kwargs):
    return [0.0 for _ in completions]

def train(args, name="o/m", *, lr=2e-6, group=4):
    config = GRPOConfig("runs/a", learning_rate=lr, num_generations=group, beta=args.beta)
    trainer = GRPOTrainer(model=name, reward_funcs=reward, args=config, train_dataset=load_dataset("o/d"))
    trainer.train()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--beta", type=float, default=0.04)
    args = parser.parse_args()
    train(args, CALL)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("call", "name", "lr", "group"),
    [('"o/other", lr=args.lr', "o/other", 3e-6, 4), ("group=16", "o/m", 2e-6, 16)],
)
def test_parameters_of_a_function_stand_for_the_arguments_of_its_call(folder, call, name, lr, group):
    Path("train.py").write_text(IN_A_FUNCTION.replace("CALL", call))
    found = migrate("trl", ["train.py"], {})
    assert (found.config["model"]["path"], found.config["learner"]["lr"]) == (name, lr)
    assert (found.config["group_size"], found.config["algorithm"]["kl_coef"]) == (group, 0.04)
    assert not todo(found)


def test_the_command_sets_what_a_function_is_called_with(folder):
    Path("train.py").write_text(IN_A_FUNCTION.replace("CALL", "lr=args.lr"))
    assert migrate("trl", ["python train.py --lr 1e-5"], {}).config["learner"]["lr"] == 1e-5


def test_a_parameter_with_two_values_is_unknown(folder):
    Path("train.py").write_text(IN_A_FUNCTION.replace("CALL", "lr=1e-6") + "    train(None, lr=1e-5)\n")
    assert "learning_rate" in todo(migrate("trl", ["train.py"], {}))


def test_a_name_that_the_file_assigns_is_no_parameter(folder):
    Path("train.py").write_text(IN_A_FUNCTION.replace("CALL", "lr=1e-6") + "    group = 2\n")
    assert migrate("trl", ["train.py"], {}).config["group_size"] == 2


def test_the_config_that_a_function_returns_is_read_once(folder):
    Path("train.py").write_text(
        "def configured(lr):\n    return GRPOConfig('runs/a', learning_rate=lr)\n"
        "trainer = GRPOTrainer('o/m', 'o/reward', args=configured(4e-6), train_dataset=load_dataset('o/d'))\n"
    )
    found = migrate("trl", ["train.py"], {})
    assert (found.config["learner"]["lr"], found.config["name"]) == (4e-6, "a")
    assert not todo(found)


def test_the_defaults_of_dataclasses_reach_a_function(folder):
    Path("train.py").write_text(
        "@dataclass\nclass Options:\n    data: str = field(default='o/d')\n    rate: float = 5e-6\n"
        "def main(options, training):\n    training.learning_rate = options.rate\n"
        "    GRPOTrainer('o/m', 'o/reward', args=training, train_dataset=load_dataset(options.data))\n"
        "own, rest = HfArgumentParser((Options, GRPOConfig)).parse_args_into_dataclasses()\nmain(own, rest)\n"
    )
    found = migrate("trl", ["python train.py --num_generations 4"], {})
    assert found.config["tasks"]["train"]["name"] == "o/d"
    assert (found.config["learner"]["lr"], found.config["group_size"]) == (5e-6, 4)


XTUNER = """
import os

def _env_bool(name: str, default: bool = False) -> bool:
    value = os.environ.get(name)
    return default if value is None else value.lower() in ("1", "true")

def _env_int(name, default):
    return int(os.getenv(name, default))

trainer = RLColocateTrainerConfig(load_from="o/m", total_train_steps=_env_int("STEPS", 7),
    enable_initial_evaluate=_env_bool("EVALUATE", default=True), seed=_env_int("SEED", 3))
"""


@pytest.mark.parametrize(
    ("environ", "steps", "before"),
    [({}, 7, True), ({"STEPS": "9", "EVALUATE": "false"}, 9, False), ({"EVALUATE": "1"}, 7, True)],
)
def test_functions_that_read_a_variable_give_its_value_or_their_default(tmp_path, environ, steps, before):
    file = tmp_path / "rl.py"
    file.write_text(XTUNER)
    found = migrate("xtuner", [str(file)], environ)
    assert (found.config["steps"], found.config["eval"]["before"], found.config["seed"]) == (steps, before, 3)
    assert not todo(found)


def test_a_function_that_reads_a_variable_has_a_default_of_its_own(tmp_path):
    file = tmp_path / "rl.py"
    file.write_text(XTUNER.replace('"EVALUATE", default=True', '"EVALUATE"'))
    assert migrate("xtuner", [str(file)], {}).config["eval"]["before"] is False
