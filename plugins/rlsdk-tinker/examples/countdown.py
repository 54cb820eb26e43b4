"""Learn Countdown with Tinker's client, and with tasks and a reward of rlsdk.

`python countdown.py UPDATES`, with the server of server.yaml.
"""

import sys

import numpy as np
import tinker
from tinker import types

import rlsdk

TASKS = rlsdk.load(
    "tasks", "countdown", size=20000, numbers=3, number_range=[1, 20], operators="+-", template="compact"
)()
REWARD = rlsdk.load("reward", "countdown", format_score=0.1)


def datum(prompt, answer, advantage):
    """Return an answer with its advantage, divided by its length."""
    before, tokens = [0.0] * (len(prompt) - 1), [*prompt, *answer.tokens]
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([*before, *answer.logprobs], np.float32),
        "advantages": np.array([*before, *[advantage / len(answer.tokens)] * len(answer.tokens)], np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def update(training, tokenizer, tasks):
    """Sample eight answers to each task, train on them by importance sampling, and return their mean reward."""
    sampler = training.save_weights_and_get_sampling_client().result()
    prompts = [tokenizer.encode(task.prompt) for task in tasks]
    params = types.SamplingParams(max_tokens=14)
    answers = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for prompt in prompts]
    data, rewards = [], []
    for task, prompt, future in zip(tasks, prompts, answers, strict=True):
        group = future.result().sequences
        texts = [tokenizer.decode(answer.tokens) for answer in group]
        found = np.array([REWARD(rlsdk.Rollout.from_text(task, text)).value for text in texts])
        rewards += found.tolist()
        data += [datum(prompt, *each) for each in zip(group, found - found.mean(), strict=True) if each[1]]
    gradient = training.forward_backward(data, "importance_sampling")
    step = training.optim_step(types.AdamParams(learning_rate=6e-4))  # sent before the gradient is there
    gradient.result()
    step.result()
    return float(np.mean(rewards))


if __name__ == "__main__":
    training = tinker.ServiceClient().create_lora_training_client(base_model="countdown-nano", rank=8).result()
    tokenizer = training.get_tokenizer()
    for number in range(int(sys.argv[1])):
        tasks = [TASKS[i] for i in range(32 * number, 32 * number + 32)]
        print(f"update {number + 1}: mean reward {update(training, tokenizer, tasks):.3f}", flush=True)
