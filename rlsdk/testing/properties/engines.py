"""Properties of a started engine: what it samples from a small model, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, Completion, Model, OnlySamples, Request, Sampling, Weights
from rlsdk.engines.canary import TOLERANCE
from rlsdk.engines.checks import completion_fault
from rlsdk.errors import described
from rlsdk.testing.findings import NotApplicable, Violated
from rlsdk.testing.subject import Subject, holds

MAX_LENGTH = 128
PROMPTS = tuple(np.array(ids) for ids in ([20, 7, 30, 3], [41, 12, 9], [5, 66, 31, 8, 19]))
ATOL = TOLERANCE["float32"]
STARTED = ("starts",)
ANSWERS = ("starts", "answers-requests")
PLAIN = Sampling()
_STEPS = 40 * MAX_LENGTH
"""Steps within which a few requests must be finished; an engine may return from a step with nothing."""


@attrs.define(eq=False)
class EngineTrial:
    """An engine that samples from a small model, which transformers runs as well."""

    engine: Any
    folder: Path
    net: Any = attrs.field(init=False)
    tokenizer: Any = attrs.field(init=False)

    def start(self, subject: Subject) -> None:
        """Start the engine with a new model.

        Raises:
            Violated: It does not start.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rlsdk.nano import create

        create(self.folder, initializer_range=0.2)
        model = Model(path=str(self.folder), max_length=MAX_LENGTH)
        try:  # without a limit of its own: some engines take minutes
            self.engine.start(model, ActorSpec(role="engine"))
        except Exception as error:
            raise Violated("raised", "a started engine", described(error)) from error
        self.net = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def settle(self) -> None:
        """Drop requests that a property left unfinished."""
        self.engine.abort()

    def requests(self, how: Sampling, *, n: int = 1, seed: int | None = None, prefix: str = "r") -> list[Request]:
        """Return one request for each prompt."""
        return [
            Request(id=f"{prefix}{i}", prompt_ids=ids, sampling=how, n=n, seed=None if seed is None else seed + i)
            for i, ids in enumerate(PROMPTS)
        ]

    def generate(self, subject: Subject, asked: Sequence[Request]) -> dict[tuple[str, int], Completion]:
        """Add requests, and step until all are finished.

        Raises:
            Violated: The engine never finishes, or a completion is not one of those requested.
        """
        return self.finish(subject, asked, self.begin(subject, asked, 0))

    def begin(self, subject: Subject, asked: Sequence[Request], steps: int) -> list[Completion]:
        """Add requests and take some steps; return the completions that these finished."""
        subject.call(self.engine.add, asked)
        return [completion for _ in range(steps) for completion in subject.call(self.engine.step)]

    def finish(
        self, subject: Subject, asked: Iterable[Request], done: Sequence[Completion] = ()
    ) -> dict[tuple[str, int], Completion]:
        """Step until all requests are finished."""
        wanted = {(r.id, i) for r in asked for i in range(r.n)}
        found: dict[tuple[str, int], Completion] = {}
        for step in range(_STEPS + 1):
            for completion in done:
                key = (completion.request, completion.index)
                if key in found or key not in wanted:
                    more = "twice" if key in found else f"; requested were {shown_keys(wanted)}"
                    raise Violated("value", "one completion for each continuation", f"{shown_keys([key])}{more}")
                found[key] = completion
            if not subject.call(lambda: self.engine.unfinished):
                break
            if step == _STEPS:
                missing = shown_keys(wanted - found.keys()) or "none is missing"
                raise Violated("late", f"`unfinished` 0 after {_STEPS} steps", f"still running: {missing}")
            done = subject.call(self.engine.step)
        if lost := wanted - found.keys():
            raise Violated("value", "a completion for each continuation", f"none for {shown_keys(lost)}")
        return found

    def expected(self, completion: Completion, how: Sampling, net: Any = None) -> np.ndarray:
        """Return the logprobs of a completion's tokens under the distribution that it should be sampled from."""
        prompt = PROMPTS[int(completion.request.lstrip("abr"))]
        ids = np.concatenate([prompt, completion.token_ids])
        return logprobs_of(net or self.net, ids, how)[len(prompt) - 1 :]

    def trainable(self) -> None:
        """Skip a property of engines whose samples are trained on.

        Raises:
            NotApplicable: The engine is for evaluation only.
        """
        if isinstance(self.engine, OnlySamples):
            raise NotApplicable("its samples are not trained on")


def shown_keys(keys: Iterable[tuple[str, int]]) -> str:
    """List continuations as `r0[1]`, a few of them."""
    listed = sorted(keys)
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return ", ".join(f"{name}[{index}]" for name, index in listed[:4]) + more


def logprobs_of(net: Any, ids: np.ndarray, how: Sampling = PLAIN) -> np.ndarray:
    """Return the logprob of each token given those before it, float32 `[k - 1]`, computed with transformers."""
    import torch

    tokens = torch.from_numpy(np.asarray(ids, dtype=np.int64))
    with torch.inference_mode():
        logits = net(tokens[None]).logits[0, :-1].float() / (how.temperature or 1.0)
        ordered = logits.sort(-1, descending=True).values
        if how.top_k:
            logits = logits.masked_fill(logits < ordered[:, how.top_k - 1 : how.top_k], -torch.inf)
        if how.top_p < 1:
            probs = ordered.softmax(-1)
            kept = ((probs.cumsum(-1) - probs) < how.top_p).sum(-1, keepdim=True)
            logits = logits.masked_fill(logits < ordered.gather(-1, kept - 1), -torch.inf)
        found: np.ndarray = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    return found


def check_near(found: Any, wanted: np.ndarray, what: str) -> None:
    """Compare logprobs, within the tolerance of a run's canary.

    Raises:
        Violated: They differ, or have another form.
    """
    if not isinstance(found, np.ndarray) or found.shape != wanted.shape or found.dtype != np.float32:
        told = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
        raise Violated("form", f"{what}: a float32 array {list(wanted.shape)}", told)
    gaps = np.nan_to_num(np.abs(found - wanted), nan=np.inf)
    if len(gaps) and gaps.max() > ATOL:
        at = int(gaps.argmax())
        raise Violated("value", f"{what}: {wanted[at]:.4f} for token {at}, as transformers gives", f"{found[at]:.4f}")


ENDLESS = Sampling(max_tokens=12, ignore_eos=True)


@holds(
    "starts",
    "engine",
    remedy="let `start` load the given model folder, in float32 on the CPU; an engine that needs a GPU cannot be tried "
    "here",
    starts=True,
)
def starts(subject: Subject, trial: EngineTrial) -> None:
    """It starts on the CPU with a small Llama, two layers of width 128."""
    trial.start(subject)


@holds(
    "answers-requests",
    "engine",
    remedy="return n completions for each request, with its id and the indices 0 to n - 1, and count in `unfinished` "
    "the continuations that have not been returned",
    after=STARTED,
    starts=True,
)
def answers_requests(subject: Subject, trial: EngineTrial) -> None:
    """Each request gets `n` completions with its id and the indices from 0, and `unfinished` counts missing ones."""
    asked = [attrs.evolve(r, n=n) for r, n in zip(trial.requests(ENDLESS), (3, 1, 2), strict=True)]
    subject.call(trial.engine.add, asked)
    count = subject.call(lambda: trial.engine.unfinished)
    done = trial.finish(subject, asked)
    if count != 6:
        raise Violated("value", "`unfinished` 6 after requests with n = 3, 1 and 2 were added", repr(count))
    texts = {tuple(done["r0", i].token_ids.tolist()) for i in range(3)}
    if len(texts) == 1:
        raise Violated("value", "n = 3 continuations that differ, each drawn on its own", "three equal ones")


@holds(
    "sound-completions",
    "engine",
    remedy="return for each sampled token its logprob and the version of the weights that sampled it, and the finish "
    "reason stop, length or abort",
    after=ANSWERS,
    starts=True,
)
def sound_completions(subject: Subject, trial: EngineTrial) -> None:
    """A completion has int64 tokens, at most `max_tokens`, with a finite float32 logprob and a version each."""
    how, size = Sampling(max_tokens=12), trial.net.config.vocab_size
    asked = {r.id: r for r in trial.requests(how, n=4)}
    for (name, index), completion in trial.generate(subject, list(asked.values())).items():
        if fault := completion_fault(completion, asked[name], 0, size):
            raise Violated("form", f"a completion {name}[{index}] as the contract says", fault)
        for field, dtype in (("token_ids", "int64"), ("logprobs", "float32"), ("versions", "int64")):
            if (given := str(getattr(completion, field).dtype)) != dtype:
                raise Violated("form", f"{field} of dtype {dtype}", given)
        if completion.versions.any():
            raise Violated("value", "version 0 of each token before weights are loaded", f"{completion.versions}")


@holds(
    "ends-where-it-should",
    "engine",
    remedy="end a continuation with the first token among `stop_token_ids` or the tokenizer's end of text, or with the "
    "first stop string in its text; keep that token; report `stop`, or `length` for one that reached its limit",
    after=("starts", "answers-requests", "sound-completions"),
    starts=True,
)
def ends_where_it_should(subject: Subject, trial: EngineTrial) -> None:
    """A response ends with the first stop token, end of text or stop string, which it keeps, or at its limit."""
    eos, size = trial.tokenizer.eos_token_id, trial.net.config.vocab_size
    ids = tuple(range(3, size, 3))
    digits = tuple("123456")
    cases: list[tuple[str, Sampling, int, set[int], tuple[str, ...]]] = [
        ("stop_token_ids", Sampling(max_tokens=24, stop_token_ids=ids), 6, {*ids, eos}, ()),
        ("the end of text", Sampling(max_tokens=64), 16, {eos}, ()),
        ("ignore_eos", Sampling(max_tokens=24, ignore_eos=True, stop_token_ids=ids), 2, set(), ()),
        ("stop", Sampling(max_tokens=24, stop=digits), 6, {eos}, digits),
    ]
    for what, how, n, ends, strings in cases:
        for completion in trial.generate(subject, trial.requests(how, n=n, seed=11)).values():
            tokens = completion.token_ids.tolist()
            end = _first_end(trial.tokenizer, tokens, ends, strings)
            told = f"{len(tokens)} tokens with finish {completion.finish!r}"
            if end is not None and (len(tokens) > end or completion.finish != "stop"):
                raise Violated("value", f"{what}: {end} tokens, ended by the last, with finish 'stop'", told)
            if end is None and (len(tokens), completion.finish) != (how.max_tokens, "length"):
                raise Violated("value", f"{what}: {how.max_tokens} tokens with finish 'length', none ends them", told)


def _first_end(tokenizer: Any, tokens: list[int], ends: set[int], strings: tuple[str, ...]) -> int | None:
    """Return the number of tokens up to and including the first that ends a response; None if none does."""
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] in ends:
            return count
        if strings and any(each in tokenizer.decode(tokens[:count]) for each in strings):
            return count
    return None


@holds(
    "obeys-the-models-length",
    "engine",
    remedy="end a continuation with finish `length` once prompt and response have model.max_length tokens",
    after=ANSWERS,
    starts=True,
)
def obeys_the_models_length(subject: Subject, trial: EngineTrial) -> None:
    """Prompt and response together have at most `model.max_length` tokens."""
    prompt = np.resize(PROMPTS[0], MAX_LENGTH - 5)
    asked = [Request(id="r0", prompt_ids=prompt, sampling=attrs.evolve(ENDLESS, max_tokens=40))]
    done = trial.generate(subject, asked)["r0", 0]
    if (len(done.token_ids), done.finish) != (5, "length"):
        said = f"{len(done.token_ids)} tokens with finish {done.finish!r}"
        raise Violated(
            "value", f"5 tokens with finish 'length' after a prompt of {len(prompt)} (max_length {MAX_LENGTH})", said
        )


@holds(
    "obeys-seeds",
    "engine",
    remedy="draw each continuation from a generator of its own, seeded by the request's seed and its index; without a "
    "seed, from one that `reseed` sets",
    after=ANSWERS,
    starts=True,
)
def obeys_seeds(subject: Subject, trial: EngineTrial) -> None:
    """The same seed gives the same tokens, whatever else is sampled, and other seeds others; so does `reseed`."""

    def tokens(asked: Sequence[Request]) -> list[list[int]]:
        done = trial.generate(subject, asked)
        return [done[r.id, i].token_ids.tolist() for r in asked for i in range(r.n)]

    seeded = trial.requests(ENDLESS, n=3, seed=5)
    first = tokens(seeded[:1])
    others = trial.requests(ENDLESS, n=2, seed=50, prefix="b")
    if tokens(seeded[:1]) != first:
        raise Violated("value", f"{first[0]} again, from the same request with seed 5", "other tokens")
    if tokens([*others, *seeded[:1]])[-3:] != first:
        raise Violated("value", "the same tokens from seed 5 while other requests run", "other tokens")
    if tokens([attrs.evolve(seeded[0], seed=6)]) == first:
        raise Violated("value", "other tokens from seed 6 than from seed 5", "the same")
    found = []
    for seed in (3, 3, 4):
        subject.call(trial.engine.reseed, seed)
        found.append(tokens(trial.requests(ENDLESS, n=2)))
    if found[0] != found[1]:
        raise Violated("value", "the same tokens of requests without a seed after the same reseed(3)", "other tokens")
    if found[0] == found[2]:
        raise Violated("value", "other tokens after reseed(4) than after reseed(3)", "the same")


@holds(
    "true-logprobs",
    "engine",
    remedy="report the logprob of each sampled token under the distribution that it was drawn from: after temperature, "
    "top-p and top-k; at temperature 0, the most likely token with its logprob at temperature 1",
    after=("starts", "answers-requests", "sound-completions"),
    starts=True,
)
def true_logprobs(subject: Subject, trial: EngineTrial) -> None:
    """Logprobs are those of the distribution sampled from, as transformers computes them for the same weights."""
    trial.trainable()
    for changes in ({}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}):
        how = attrs.evolve(ENDLESS, **changes)
        told = ", ".join(f"{key}={value}" for key, value in changes.items()) or "temperature=1"
        for completion in trial.generate(subject, trial.requests(how, n=2, seed=1)).values():
            wanted = trial.expected(completion, how)
            check_near(completion.logprobs, wanted, f"logprobs with {told}")
            if how.temperature == 0:
                _check_greedy(trial, completion)


def _check_greedy(trial: EngineTrial, completion: Completion) -> None:
    import torch

    prompt = PROMPTS[int(completion.request[1:])]
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]))
    with torch.inference_mode():
        best = trial.net(ids[None]).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    if best != completion.token_ids.tolist():
        raise Violated("value", f"the likeliest tokens {best} at temperature 0", f"{completion.token_ids.tolist()}")


@holds(
    "aborts",
    "engine",
    remedy="end only the requests named (None: all), return the tokens sampled so far with finish `abort`, and go on "
    "with the others",
    after=ANSWERS,
    starts=True,
)
def aborts(subject: Subject, trial: EngineTrial) -> None:
    """`abort` returns the continuations of the requests that it names, with finish `abort`; others continue."""
    asked = trial.requests(attrs.evolve(ENDLESS, max_tokens=60), n=2, seed=1)
    done = trial.begin(subject, asked, 3)
    ended = subject.call(trial.engine.abort, ["r0"])
    told = [(c.request, c.index, c.finish) for c in ended]
    if sorted(told) != [("r0", 0, "abort"), ("r0", 1, "abort")]:
        raise Violated("value", "r0[0] and r0[1] with finish 'abort', from abort(['r0'])", repr(sorted(told)))
    if (count := subject.call(lambda: trial.engine.unfinished)) != 4:
        raise Violated("value", "`unfinished` 4 after one of three requests with n = 2 was aborted", repr(count))
    trial.finish(subject, asked, [*done, *ended])


@holds(
    "computes-logprobs",
    "engine",
    remedy="return the logprob at temperature 1 of each token given those before it, from the current weights",
    after=STARTED,
    starts=True,
)
def computes_logprobs(subject: Subject, trial: EngineTrial) -> None:
    """`logprobs` returns float32 `[k - 1]` for `k` tokens, as transformers computes them; runs compare them."""
    trial.trainable()
    ids = np.concatenate(PROMPTS)
    check_near(subject.call(trial.engine.logprobs, ids), logprobs_of(trial.net, ids), "logprobs(token_ids)")


@holds(
    "loads-weights",
    "engine",
    remedy="replace all tensors in load_weights, drop every cache of the old ones, and give tokens sampled from then "
    "on `weights.version`",
    after=("starts", "answers-requests", "sound-completions", "computes-logprobs", "true-logprobs"),
    starts=True,
)
def loads_weights(subject: Subject, trial: EngineTrial) -> None:
    """After `load_weights`, running and new requests are sampled from the new weights and carry their version."""
    trial.trainable()
    net, new = changed(trial.net, 7)
    asked = trial.requests(attrs.evolve(ENDLESS, max_tokens=24), n=2, seed=2)
    done = trial.begin(subject, asked, 5)
    subject.call(trial.engine.load_weights, new)
    ids = np.concatenate(PROMPTS)
    wanted = logprobs_of(net, ids)
    check_near(subject.call(trial.engine.logprobs, ids), wanted, "logprobs(token_ids) after load_weights")
    found = list(trial.finish(subject, asked, done).values())
    found += trial.generate(subject, trial.requests(ENDLESS, n=1, seed=2, prefix="a")).values()
    for completion in found:
        what = f"{completion.request}[{completion.index}], sampled while weights of version 7 were loaded"
        count = int((completion.versions == 0).sum())
        if completion.versions.tolist() != [0] * count + [7] * (len(completion.versions) - count):
            raise Violated("value", f"versions 0, then 7: {what}", f"{completion.versions.tolist()}")
        if completion.request.startswith("a") and count:
            raise Violated("value", "version 7 for tokens of a request added after load_weights", "version 0")
        fresh = trial.expected(completion, ENDLESS, net)[count:]
        check_near(completion.logprobs[count:], fresh, f"logprobs of the tokens of version 7 ({what})")


def changed(net: Any, version: int) -> tuple[Any, Weights]:
    """Return a model with other weights than the given one, and these weights."""
    import copy

    import torch

    from rlsdk.weights import to_weights

    other = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    return other, to_weights(version, {name: tensor.detach() for name, tensor in other.state_dict().items()})


@holds(
    "survives-sleep",
    "engine",
    remedy="keep running requests in `sleep`, and continue them after `wake` and `load_weights`",
    after=("starts", "answers-requests", "loads-weights"),
    starts=True,
)
def survives_sleep(subject: Subject, trial: EngineTrial) -> None:
    """After `sleep`, `wake` and `load_weights`, requests that were running are finished under the new weights."""
    trial.trainable()
    net, new = changed(trial.net, 9)
    asked = trial.requests(attrs.evolve(ENDLESS, max_tokens=24), n=2, seed=3)
    done = trial.begin(subject, asked, 4)
    for call in (trial.engine.sleep, trial.engine.wake):
        subject.call(call)
    subject.call(trial.engine.load_weights, new)
    for completion in trial.finish(subject, asked, done).values():
        since = completion.versions == 9
        fresh = trial.expected(completion, ENDLESS, net)
        check_near(completion.logprobs[since], fresh[since], "logprobs of tokens sampled after sleep and wake")
