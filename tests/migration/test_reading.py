"""Files and commands of other trainers: supported contents, and messages for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsdk.errors import ConfigError
from rlsdk.migration import Migration, migrate

HERE = Path(__file__).parent


def status(found: Migration, key: str) -> str:
    return next(entry.status for entry in found.entries if entry.key == key)


def verl(*arguments: str, **environ: str) -> dict[str, Any]:
    return dict(migrate("verl", arguments, environ).config)


def test_a_command_may_be_words_or_one_text():
    together = (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=32 trainer.total_epochs=3 'trainer.logger=[wandb]'"
    )
    split = ["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=32", "+trainer.total_epochs=3"]
    found = verl(together)
    assert (found["batch_size"], found["epochs"], found["trackers"]) == (32, 3.0, ["wandb"])
    assert verl(*split)["batch_size"] == 32
    assert verl("data.train_batch_size=32", "trainer.total_epochs=3")["epochs"] == 3.0


def test_flags_of_python_are_no_keys():
    found = migrate("verl", ["python3 -m verl.experimental.one_step_off_policy.main_ppo data.seed=3"], {})
    assert [entry.key for entry in found.entries] == ["data.seed"]


def test_flags_have_values_after_them_or_none():
    found = migrate("openrlhf", ["--actor.eps_clip_low_high", "0.2", "0.27", "--bf16", "--seed=7"], {}).config
    assert found["algorithm"]["policy_loss"]["clip_high"] == 0.27
    assert (found["model"]["dtype"], found["seed"]) == ("bfloat16", 7)


def test_numbers_come_from_the_environment_and_texts_keep_its_names():
    command = "python -m verl.trainer.main_ppo trainer.n_gpus_per_node=$N actor_rollout_ref.model.path=$M/x"
    found = verl(command, N="4", M="/models")
    assert (found["placement"]["learners"], found["model"]["path"]) == (4, "${oc.env:M}/x")


def test_an_unset_variable_for_a_number_is_reported():
    found = migrate("verl", ["python -m verl.trainer.main_ppo data.train_batch_size=$N x=1"], {})
    entry = next(entry for entry in found.entries if entry.key == "data.train_batch_size")
    assert entry.status == "missing"
    assert "set N in the environment" in entry.note


def test_values_computed_from_an_unset_number_take_the_other_trainers_default():
    config = verl("python -m verl.trainer.main_ppo data.max_prompt_length=$((N * 8)) data.max_response_length=$M")
    assert config["model"]["max_length"] == 512 + 512


def test_a_script_with_computed_lengths_and_fallbacks_with_quotes(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        'response=$((1024 * 8))\nTRAIN=${TRAIN:-"${HOME}/d/train.parquet"}\n'
        'python3 -m verl.trainer.main_ppo data.max_response_length=$response data.train_files="${TRAIN}"\n'
    )
    config = verl(str(script))
    assert config["sampling"]["max_tokens"] == 8192
    path = "${oc.env:TRAIN,${oc.env:HOME}/d/train.parquet}"
    assert config["tasks"]["train"] == {"use": "parquet", "path": path}


def test_a_command_inside_quotes_is_read():
    script = 'C="train_ppo_ray.py --seed 7"\nsrun x bash -c "cd /w && ray job submit -- python3 $C --zero_stage 3"'
    found = migrate("openrlhf", [script], {}).config
    assert (found["seed"], found["learner"]["zero_stage"]) == (7, 3)


def test_interpolations_of_a_file_are_resolved(tmp_path):
    file = tmp_path / "roll.yaml"
    file.write_text("exp_name: x\nn: 128\nresponse_length: ${n}\n")
    found = migrate("roll", [str(file), "exp_name=y"], {}).config
    assert (found["sampling"]["max_tokens"], found["name"]) == (128, "y")


@pytest.mark.parametrize("text", ["${nothing.there}", "${a}", "${f:x}", "${", "${${a}}"])
def test_interpolations_that_lead_nowhere_stay(tmp_path, text):
    file = tmp_path / "roll.yaml"
    file.write_text(f"exp_name: x\na: ${{b}}\nb: ${{a}}\nseed: '{text}'\n")
    assert status(migrate("roll", [str(file)], {}), "seed") in ("missing", "ignored")


def test_null_stands_for_the_other_trainers_default():
    found = migrate("verl", ["actor_rollout_ref.actor.loss_agg_mode=null", "trainer.max_actor_ckpt_to_keep=null"], {})
    assert found.config["algorithm"]["aggregate"] == "token-mean"


def test_a_file_that_a_command_names_is_read(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-5\nnum_generations: 4\n")
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --config run.yaml --num_generations 16\n")
    found = migrate("trl", [str(script)], {}).config
    assert (found["learner"]["lr"], found["group_size"]) == (1e-5, 16)
    script.write_text("trl grpo --config other.yaml --num_generations 16\n")
    assert "other.yaml" in migrate("trl", [str(script)], {}).notes[0]


def test_python_is_read_and_not_run():
    found = migrate("xtuner", [str(HERE / "files" / "xtuner_grpo.py")], {"WORLD_SIZE": "2"})
    config = found.config
    assert (config["batch_size"], config["group_size"], config["steps"]) == (64, 8, 100)
    assert (config["model"]["path"], config["placement"]["learners"]) == ("${oc.env:MODEL_PATH}", 16)
    assert config["learner"]["warmup_steps"] == 40
    assert config["learner"]["final_ratio"] == pytest.approx(0.1)
    assert config["reward"] == {"use": "math", "strict": False}
    entry = next(entry for entry in found.entries if entry.key.endswith("pack_max_length"))
    assert (entry.status, "not read" in entry.note) == ("missing", True)


def test_arguments_of_trls_script_are_read(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "from trl import GRPOConfig, GRPOTrainer\nimport os\nos.remove('x')\ndef main():\n    args = GRPOConfig("
        "learning_rate=1e-5, num_generations=4, beta=0.04)\n    GRPOTrainer(model='org/model', args=args, "
        "reward_funcs=my_reward)\n"
    )
    found = migrate("trl", [str(file)], {})
    assert (found.config["learner"]["lr"], found.config["model"]["path"]) == (1e-5, "org/model")
    assert found.config["algorithm"]["kl_coef"] == 0.04
    assert status(found, "reward_funcs") == "missing"


def test_an_adapter_of_trls_script_is_read(tmp_path):
    file = tmp_path / "train.py"
    adapter = "LoraConfig(r=4, target_modules=['q_proj'], task_type='CAUSAL_LM', use_dora=True)"
    file.write_text(f"GRPOTrainer(model='org/model', peft_config={adapter})\n")
    found = migrate("trl", [str(file)], {})
    assert found.config["learner"]["lora"] == {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}
    assert [entry.key for entry in found.entries if entry.status == "missing"] == ["peft_config.use_dora"]


TRL_SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
from lab.judging import judged

def exact(completions, solution, **kwargs):
    return [0.0 for _ in completions]

async def brief(completions, **kwargs):
    return [None for _ in completions]

data = load_dataset("openai/gsm8k", "main")["train"]
data = data.map(lambda x: {"prompt": x["question"]})
args = GRPOConfig(learning_rate=1e-5, reward_weights=[1.0, 0.5, 0.2, 0.1, 2.0])
functions = [exact, brief, think_format_reward, judged, "org/reward-1.5B"]
"""
TRL_START = 'GRPOTrainer(model="org/model", args=args, train_dataset=data, reward_funcs=functions).train()\n'


COSINE = ("max_length", "wrong_short", "wrong_long", "right_long", "right_short")


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("max_completion_len=args.max_completion_length, soft_punish_cache=64", {"max_length": 256, "buffer": 64}),
        ("256, 64", {"max_length": 256, "buffer": 64}),
    ],
)
def test_trls_punishment_of_long_answers_is_a_shaping_with_its_limits_and_weight(tmp_path, call, options):
    (tmp_path / "train.py").write_text(
        "from trl.rewards import accuracy_reward, get_soft_overlong_punishment\n"
        "args = GRPOConfig(max_completion_length=256, reward_weights=[1.0, 0.2])\n"
        f"functions = [accuracy_reward, get_soft_overlong_punishment({call})]\n"
        'GRPOTrainer(model="org/model", args=args, reward_funcs=functions).train()\n'
    )
    found = migrate("trl", [str(tmp_path / "train.py")], {})
    assert found.config["reward"] == {"use": "math", "weight": 1.0}
    assert found.config["algorithm"]["shaping"] == [{"use": "overlong", **options, "penalty": 0.2}]
    assert [entry.status for entry in found.entries if entry.key == "reward_funcs"] == ["changed"]


def trl_with(folder, functions):
    imported = "from trl.rewards import accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward\n"
    (folder / "train.py").write_text(
        f"{imported}args = GRPOConfig(max_completion_length=256)\n"
        f'GRPOTrainer(model="org/model", args=args, reward_funcs=[{functions}]).train()\n'
    )
    found = migrate("trl", [str(folder / "train.py")], {})
    return found, [entry for entry in found.entries if entry.key == "reward_funcs"]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("max_len=args.max_completion_length", {"max_length": 256}),
        ("200, -2.0, -1.5, 1.5, 2.0", dict(zip(COSINE, (200, -2.0, -1.5, 1.5, 2.0), strict=True))),
        ("max_len=200, max_value_correct=3.0", {"max_length": 200, "right_short": 3.0}),
    ],
)
def test_trls_cosine_reward_is_a_shaping_on_math_and_with_other_functions_a_foreign_reward(tmp_path, call, options):
    found, (entry,) = trl_with(tmp_path, f"get_cosine_scaled_reward({call})")
    assert (found.config["reward"], entry.status) == ({"use": "math"}, "changed")
    assert found.config["algorithm"]["shaping"] == [{"use": "cosine_length", **options}]
    code = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text(code.replace("[", "").replace("]", ""))
    assert migrate("trl", [str(tmp_path / "train.py")], {}).config == found.config
    found, (entry,) = trl_with(tmp_path, f"accuracy_reward, get_cosine_scaled_reward({call})")
    assert entry.status == "missing" and "reward = get_cosine_scaled_reward" in entry.note
    assert "shaping" not in found.config["algorithm"]


def test_trls_penalty_on_repetitions_is_a_reward_on_tokens(tmp_path):
    found, (entry,) = trl_with(tmp_path, "accuracy_reward, get_repetition_penalty_reward(4, max_penalty=-0.5)")
    penalty = {"use": "repetition_penalty", "unit": "tokens", "ngram": 4, "penalty": 0.5}
    assert (found.config["reward"], entry.status) == ([{"use": "math"}, penalty], "changed")


@pytest.mark.parametrize(
    ("start", "file", "moved"),
    [
        (f"if __name__ == '__main__':\n    {TRL_START}", "scripts/train.py", False),
        (TRL_START, "rewards.py", True),
    ],
)
def test_functions_and_data_of_trls_script_are_named(tmp_path, monkeypatch, start, file, moved):
    monkeypatch.chdir(tmp_path)
    Path("scripts").mkdir()
    script = TRL_SCRIPT.replace("args = GRPOConfig(", "args = dict(") if not moved else TRL_SCRIPT
    start = start.replace("args=args", "args=GRPOConfig(**args)") if not moved else start
    Path("scripts/train.py").write_text(script + start)
    found = migrate("trl", ["scripts/train.py"], {})
    foreign = {"use": "foreign", "style": "trl", "none": "zero"}
    assert [{k: v for k, v in each.items() if k != "pattern"} for each in found.config["reward"]] == [
        {**foreign, "path": f"{file}:exact", "weight": 1.0, "metric": "exact"},
        {**foreign, "path": f"{file}:brief", "weight": 0.5, "metric": "brief"},
        {"use": "format", "weight": 0.2},
        {**foreign, "path": "lab.judging:judged", "weight": 0.1, "metric": "judged"},
        {"use": "reward_model", "path": "org/reward-1.5B", "weight": 2.0},
    ]
    assert found.config["tasks"]["train"] == {"use": "hub", "name": "openai/gsm8k", "config": "main", "split": "train"}
    assert any("data.map(" in note and "not converted" in note for note in found.notes)
    assert any("move exact and brief" in note and "would start its training" in note for note in found.notes) == moved
    assert not [entry.key for entry in found.entries if entry.key.startswith("args")]


def test_a_function_of_a_module_beside_trls_script_is_named_by_its_file(tmp_path):
    (tmp_path / "judging.py").write_text("def judged(completions): ...\n")
    (tmp_path / "train.py").write_text(
        "from judging import judged\nGRPOTrainer('org/model', judged, GRPOConfig('runs/a', num_generations=4))\n"
    )
    found = migrate("trl", [str(tmp_path / "train.py")], {})
    assert found.config["reward"] == {"use": "foreign", "path": f"{tmp_path}/judging.py:judged", "style": "trl"}
    assert not any("would start its training" in note for note in found.notes)
    assert (found.config["name"], found.config["out"], found.config["model"]["path"]) == ("a", "runs", "org/model")


def test_data_that_a_function_of_trls_script_makes_is_to_do_by_hand(tmp_path):
    file = tmp_path / "train.py"
    start = "GRPOTrainer(model='m', args=GRPOConfig(eval_strategy='{}'), train_dataset=make('train').shuffle(), "
    for strategy, held_out in (("steps", "missing"), ("no", "ignored")):
        file.write_text(f"{start.format(strategy)}eval_dataset=make('test'))\n")
        found = migrate("trl", [str(file)], {})
        assert "tasks" not in found.config
        assert status(found, "train_dataset.class") == "missing"
        assert status(found, "eval_dataset.argument_1") == held_out
        assert any("dataset.to_json('train.jsonl')" in entry.note for entry in found.entries)


@pytest.mark.parametrize(
    ("train", "held_out", "sources"),
    [
        (
            'load_dataset("json", data_files="a.jsonl", split="train")',
            'load_dataset("json", data_files="b.jsonl", split="train")',
            [{"use": "jsonl", "path": "a.jsonl"}, {"use": "jsonl", "path": "b.jsonl"}],
        ),
        (
            'load_dataset("parquet", data_files={"train": ["a.parquet", "c.parquet"], "test": "b.parquet"})["train"]',
            'load_dataset("parquet", data_files={"train": ["a.parquet", "c.parquet"], "test": "b.parquet"})["test"]',
            [{"use": "parquet", "path": ["a.parquet", "c.parquet"]}, {"use": "parquet", "path": "b.parquet"}],
        ),
        (
            'load_dataset(path="csv", data_files="a.csv")["train"]',
            'load_dataset("org/data", data_files="b.csv", split="test")',
            [{"use": "jsonl", "path": "a.csv"}, {"use": "hub", "name": "org/data", "split": "test"}],
        ),
        (
            'load_from_disk("a").shuffle(seed=1)',
            'Dataset.from_json("b.jsonl").map(f)',
            [{"use": "hub", "name": "a", "split": "train"}, {"use": "jsonl", "path": "b.jsonl"}],
        ),
    ],
)
def test_files_that_trls_script_loads_are_the_sources(tmp_path, train, held_out, sources):
    file = tmp_path / "train.py"
    file.write_text(
        f"from datasets import load_dataset\nfrom lab import judged\nconfig = GRPOConfig(eval_strategy='steps')\n"
        f"GRPOTrainer(model='m', args=config, train_dataset={train}, eval_dataset={held_out}, reward_funcs=judged)\n"
    )
    found = migrate("trl", [str(file)], {})
    assert [found.config["tasks"]["train"], found.config["tasks"]["eval"]] == sources
    assert any("no source reads csv" in note for note in found.notes) == ("csv" in train)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "expected a mapping"),
        ("a.yaml", "", "expected a mapping"),
        ("a.yaml", "just text", "expected a mapping"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a.yaml", "[" * 5000, "too deeply nested"),
        ("a.yaml", "a: 1" + "0" * 5000, "not valid YAML"),
        ("a.py", "def (", "not valid Python"),
        ("a.py", "x = 1", "no keys"),
        ("a.py", "x = " + "-" * 100_000 + "1", "too deeply nested|too complex"),  # Python 3.13 has words of its own
        ("a.sh", "", "no command"),
        ("a.yaml", "a: \0", "null character"),
    ],
)
def test_a_broken_file_gives_words(tmp_path, name, content, says):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        migrate("verl", [str(file)], {})


def test_anchors_that_multiply_are_refused(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than"):
        migrate("verl", [str(file)], {})


@pytest.mark.parametrize("content", ["x = 9**9**9", "x = 'a' * 10**9", "x = [0] * 10**9", "import os\nos._exit(3)"])
def test_expressions_that_would_never_end_are_not_computed(tmp_path, content):
    file = tmp_path / "a.py"
    file.write_text(f"{content}\ntrainer = RLColocateTrainerConfig(seed=1, total_train_steps=x)\n")
    found = migrate("xtuner", [str(file)], {})
    assert (found.config["seed"], status(found, "total_train_steps")) == (1, "missing")


def test_files_that_are_none(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for given in (str(tmp_path), str(tmp_path / "none.yaml"), str(tmp_path / "bytes.yaml")):
        with pytest.raises(ConfigError):
            migrate("verl", [given], {})
    with pytest.raises(ConfigError, match="did you mean 'verl'"):
        migrate("veerl", ["x"], {})


def test_a_placeholder_in_braces_is_a_text():
    found = migrate("openrlhf", ["--logger.wandb.key", "{wandb_token}"], {})
    assert [entry.key for entry in found.entries] == ["logger.wandb.key"]
    assert found.config["trackers"][0]["use"] == "wandb"


def test_secrets_are_not_repeated():
    found = migrate("openrlhf", ["--use_wandb", "abcdef", "--pretrain", "org/model"], {})
    assert "abcdef" not in repr(found)


@pytest.mark.parametrize(
    ("trainer", "command", "says"),
    [
        ("trl", ["trl", "sft", "--learning_rate", "1e-5"], "TRL's trl sft cannot be converted; .* algorithm: sft"),
        (
            "trl",
            ["accelerate launch --num_processes 2 scripts/dpo.py --beta 0.1 --learning_rate 1e-6"],
            "algorithm: dpo",
        ),
        ("openrlhf", ["deepspeed --module openrlhf.cli.train_rm --learning_rate 9e-6"], "reward_model"),
        ("verl", ["torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet"], "algorithm: sft"),
    ],
)
def test_other_trainings_are_refused(trainer, command, says):
    with pytest.raises(ConfigError, match=says):
        migrate(trainer, command, {})


def test_names_come_from_the_environment():
    words = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=${ENGINE:-vllm} algorithm.adv_estimator=$ADV"
    )
    config = migrate("verl", [words], {"ADV": "rloo"}).config
    assert (config["engine"]["use"], config["algorithm"]["use"]) == ("vllm", "rloo")
    assert migrate("verl", [words], {"ADV": "rloo", "ENGINE": "hf"}).config["engine"]["use"] == "transformers"


def test_the_place_of_a_script_is_known(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "run.sh"
    script.write_text(
        'ROOT="$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null 2>&1 && pwd)"\nGPUS=${1:-2}\n'
        'python3 -m openrlhf.cli.train_ppo_ray --reward.remote_url "$ROOT/f.py" --actor.num_gpus_per_node $GPUS "$@"\n'
    )
    found = migrate("openrlhf", [str(script)], {})
    assert found.config["reward"]["path"] == f"{tmp_path}/f.py:reward_func"
    assert found.config["placement"]["learners"] == 2
    assert not [note for note in found.notes if "not executed" in note]


TRL_WITH_ARGPARSE = """
import argparse
from trl import GRPOConfig, GRPOTrainer

def main():
    args = parse_args()
    config = GRPOConfig(
        output_dir=args.output_dir or f"out/{args.model_id.split('/')[-1]}",
        learning_rate=args.lr, num_generations=args.group, top_p=args.top_p,
        use_vllm=not args.no_vllm, vllm_mode=args.mode,
        vllm_server_base_url=args.url if args.mode == "server" else None,
    )
    config.run_name = args.run_name or "run"
    peft_config = None
    if args.use_lora:
        peft_config = LoraConfig(r=args.rank)
    if args.mode in ("server", "colocate"):
        config.temperature = 0.7
    GRPOTrainer(args.model_id, "org/reward-model", config, load_dataset(args.dataset), peft_config=peft_config)

def parse_args():
    parser = argparse.ArgumentParser()
    model = parser.add_argument_group("model")
    model.add_argument("--model-id", "-m", default="o/m")
    model.add_argument("--use-lora", action="store_true")
    model.add_argument("--rank", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--num", dest="group", type=int, default=16)
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--mode", choices=["server", "colocate"], default="colocate")
    parser.add_argument("--url")
    parser.add_argument("--output-dir")
    parser.add_argument("--run-name", default=None)
    parser.add_argument("--difficulty", default="easy")
    parser.add_argument("--dataset", required=True)
    return parser.parse_args()

if __name__ == "__main__":
    main()
"""


def test_defaults_of_argparse_are_read(tmp_path):
    (tmp_path / "train.py").write_text(TRL_WITH_ARGPARSE)
    found = migrate("trl", [str(tmp_path / "train.py")], {})
    config = found.config
    assert (config["name"], config["model"]["path"]) == ("run", "o/m")
    assert (config["learner"]["lr"], config["group_size"], config["sampling"]["temperature"]) == (5e-6, 16, 0.7)
    assert (config["engine"]["use"], config["placement"]["colocate"]) == ("vllm", True)
    assert "lora" not in config["learner"]
    assert "the script's own options have their defaults: if its command sets any, give the command" in found.notes
    (lost,) = [entry for entry in found.entries if entry.status == "missing"]
    assert (lost.key, "--dataset has no default" in lost.note) == ("train_dataset.argument_1", True)


def test_a_command_sets_options_of_argparse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRL_WITH_ARGPARSE)
    flags = "--num 4 --lr 1e-5 --use-lora --mode server --output-dir runs/a --dataset o/d --no-vllm --difficulty hard"
    for given in ([f"python train.py {flags}"], ["train.py", *flags.split()]):
        found = migrate("trl", given, {})
        config = found.config
        assert (config["group_size"], config["learner"]["lr"], config["learner"]["lora"]["rank"]) == (4, 1e-5, 4)
        assert (config["engine"]["use"], config["out"]) == ("transformers", "runs")
        assert config["tasks"]["train"] == {"use": "hub", "name": "o/d", "split": "train"}
        assert not [entry for entry in found.entries if entry.status == "missing"]
        assert "--difficulty: used by the script alone, and not converted" in found.notes


def test_a_branch_that_is_not_taken_has_no_effect(tmp_path):
    (tmp_path / "train.py").write_text(
        "fast = False\n"
        'if fast:\n    config = GRPOConfig("out", num_generations=2)\n'
        'else:\n    config = GRPOConfig("out", learning_rate=1e-5)\n'
        'GRPOTrainer("o/m", "org/reward-model", config)\n'
    )
    config = migrate("trl", [str(tmp_path / "train.py")], {}).config
    assert (config["group_size"], config["learner"]["lr"]) == (8, 1e-5)


TRL_WITH_DATACLASSES = """
from dataclasses import dataclass, field

@dataclass
class ScriptArguments:
    dataset: str = "o/d"
    model_id: str = field(default="o/m", metadata={"help": "the model"})
    rewards: list[str] = field(default_factory=lambda: ["org/reward-model"])

@dataclass
class MyConfig(GRPOConfig):
    num_generations: int = 4
    learning_rate: float = field(default=1e-5)

script_args, training_args = TrlParser((ScriptArguments, MyConfig)).parse_args_and_config()
training_args.beta = 0.1
GRPOTrainer(script_args.model_id, script_args.rewards, training_args, load_dataset(script_args.dataset))
"""


def test_defaults_of_dataclasses_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRL_WITH_DATACLASSES)
    config = migrate("trl", ["train.py"], {}).config
    assert (config["model"]["path"], config["group_size"], config["learner"]["lr"]) == ("o/m", 4, 1e-5)
    assert (config["algorithm"]["kl_coef"], config["tasks"]["train"]["name"]) == (0.1, "o/d")
    assert config["reward"] == {"use": "reward_model", "path": "org/reward-model"}
    found = migrate("trl", ["python train.py --num_generations 2 --dataset o/e --max_completion_length 99"], {})
    config = found.config
    assert (config["group_size"], config["sampling"]["max_tokens"], config["learner"]["lr"]) == (2, 99, 1e-5)
    assert config["tasks"]["train"]["name"] == "o/e"
    assert not [entry for entry in found.entries if entry.status == "missing"]
