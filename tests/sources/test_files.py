"""Tasks from files: columns, veRL's schema, bad rows, paths."""

from __future__ import annotations

import gzip
import json
import pickle

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rlsdk
from rlsdk.components import component_of
from rlsdk.errors import DataError, OptionError
from rlsdk.rollout.stream import TaskStream
from rlsdk.sources import files
from rlsdk.sources.countdown import countdown
from rlsdk.sources.tables import row, write


def load(kind, **options):
    return rlsdk.load("tasks", kind, **options)()


def save(path, rows):
    lines = [text if isinstance(text, str) else json.dumps(text) for text in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def save_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.mark.parametrize("template", ["base", "qwen-instruct", "chat", "compact"])
def test_what_is_written_for_verl_is_read_back(tmp_path, template):
    made = countdown(size=30, template=template, demonstrations=0.5)
    write(made, tmp_path / "train.parquet")
    read = load("parquet", path=str(tmp_path))
    assert len(read) == 30
    reward = rlsdk.load("reward", "countdown")
    for before, after in zip(made, read, strict=True):
        assert (after.prompt, after.answer, after.source) == (before.prompt, before.answer, "countdown")
        assert after.metadata["demonstration"] == before.metadata["demonstration"]
        assert after.metadata["extra_info"]["index"] == before.metadata["index"]
        text = after.metadata["demonstration"]
        assert reward(rlsdk.Rollout.from_text(after, text)) == reward(rlsdk.Rollout.from_text(before, text))


def test_the_columns_written_are_those_of_verl():
    found = row(countdown(size=1)[0])
    assert list(found) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert [message["role"] for message in found["prompt"]] == ["user"]
    assert set(found["reward_model"]) == {"style", "ground_truth"}
    assert set(found["reward_model"]["ground_truth"]) == {"target", "numbers"}
    assert {"split", "index"} <= set(found["extra_info"])


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_of_verl_are_recognised(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    (save_parquet if kind == "parquet" else save)(path, [VERL])
    task = load(kind, path=str(path))[0]
    assert [(m.role, m.content) for m in task.prompt] == [("system", "Think."), ("user", "2 + 2?")]
    assert (task.id, task.answer, task.source) == ("a:0", "4", "openai/gsm8k")
    assert task.metadata["extra_info"] == {"split": "train", "index": 0}
    assert task.metadata["reward_model"]["style"] == "rule"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_columns_are_mapped(tmp_path, kind):
    rows = [{"q": "1 + 1?", "meta": {"gold": 2, "who": "x"}, "key": "k1", "how": "one more", "level": 3}]
    path = tmp_path / "a"
    (save_parquet if kind == "parquet" else save)(path, rows)
    columns = {"prompt": "q", "answer": "meta.gold", "id": "key", "source": "meta.who", "demonstration": "how"}
    task = load(kind, path=str(path), columns=columns)[0]
    assert (task.id, task.prompt, task.answer, task.source) == ("k1", "1 + 1?", 2, "x")
    assert dict(task.metadata) == {"meta": {"gold": 2, "who": "x"}, "level": 3, "demonstration": "one more"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_an_item_of_a_list_is_a_column(tmp_path, kind):
    path = tmp_path / "a"
    (save_parquet if kind == "parquet" else save)(path, [VERL])
    task = load(kind, path=str(path), columns={"prompt": "prompt.1.content"})[0]
    assert task.prompt == "2 + 2?"
    with pytest.raises(DataError, match=r"no column 'prompt\.2\.content'"):
        load(kind, path=str(path), columns={"prompt": "prompt.2.content"})


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_demonstration_may_be_a_conversation(tmp_path, kind):
    turns = [("assistant", "1"), ("user", "No."), ("assistant", "2")]
    rows = [{"prompt": "1 + 1?", "demonstration": [{"role": role, "content": text} for role, text in turns]}]
    path = tmp_path / "a"
    (save_parquet if kind == "parquet" else save)(path, rows)
    given = load(kind, path=str(path))[0].metadata["demonstration"]
    assert [(message.role, message.content) for message in given] == turns


def test_wording(tmp_path):
    path = save(tmp_path / "a.jsonl", [{"prompt": "1?"}])
    assert load("jsonl", path=path)[0].prompt == "1?"
    assert [m.role for m in load("jsonl", path=path, chat=True)[0].prompt] == ["user"]
    whole = load("jsonl", path=path, system="Think.", prefill="Well,")[0].prompt
    assert [(m.role, m.content) for m in whole] == [("system", "Think."), ("user", "1?"), ("assistant", "Well,")]


def test_messages_that_prompts_have_already_are_not_doubled(tmp_path):
    told = [{"role": "system", "content": "Think."}, {"role": "user", "content": "1?"}]
    path = save(tmp_path / "a.jsonl", [{"prompt": told}, {"prompt": [*told, {"role": "assistant", "content": "So"}]}])
    with pytest.raises(DataError, match=r"2 of 2 rows.*\n.*line 1: the prompt already has a system message"):
        load("jsonl", path=path, system="Answer.")
    with pytest.raises(DataError, match=r"1 of 2 rows.*\n.*line 2: the prompt already ends with an assistant message"):
        load("jsonl", path=path, prefill="Well,")


def test_ids_tell_files_apart_and_ignore_folders(tmp_path):
    for name in ("x/a.jsonl", "y/a.jsonl", "y/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save(tmp_path / name, [{"prompt": name}])
    tasks = load("jsonl", path=[str(tmp_path / "x/a.jsonl"), str(tmp_path / "y/*.jsonl")])
    assert [(t.id, t.prompt) for t in tasks] == [("a-0:0", "x/a.jsonl"), ("a-1:0", "y/a.jsonl"), ("b:0", "y/b.jsonl")]
    assert [t.source for t in tasks] == ["a-0", "a-1", "b"]


def test_folders_hold_splits(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test", "training"):
        save_parquet(tmp_path / f"{name}.parquet", [{"prompt": name}])
    assert [t.prompt for t in load("parquet", path=str(tmp_path))] == ["train-00000-of-00002", "train-00001-of-00002"]
    assert [t.prompt for t in load("parquet", path=str(tmp_path), split="test")] == ["test"]
    with pytest.raises(DataError, match=r"dev\.parquet.*holds: test\.parquet"):
        load("parquet", path=str(tmp_path), split="dev")


def test_paths_of_any_file_system(tmp_path):
    import fsspec

    with fsspec.open("memory://rlsdk/a.jsonl", "w") as file:
        file.write('{"prompt": "there"}\n')
    assert load("jsonl", path="memory://rlsdk/a.jsonl")[0].prompt == "there"
    assert load("jsonl", path="memory://rlsdk/*.jsonl")[0].prompt == "there"
    local = save_parquet(tmp_path / "a.parquet", [{"prompt": "here"}])
    assert load("parquet", path=f"file://{local}")[0].prompt == "here"
    with pytest.raises(DataError, match="nowhere"):
        load("jsonl", path="nowhere://a.jsonl")


def test_compressed_lines(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "packed"}\n\n{"prompt": "twice"}'))
    assert [t.prompt for t in load("jsonl", path=str(tmp_path / "a.jsonl.gz"))] == ["packed", "twice"]


BAD = [
    ("{", "not JSON"),
    ("[1]", "JSON object"),
    ('{"prompt": ""}', "expected text"),
    ('{"prompt": null}', "empty"),
    ('{"prompt": 5}', "expected text"),
    ('{"prompt": []}', "expected text"),
    ('{"question": "?"}', "no column 'prompt'; there are: question\n.*columns: {prompt: question, answer: solution}"),
    (
        '{"prompt": "[{\\"role\\": \\"user\\", \\"content\\": \\"?\\"}]"}',
        "prompt is text that holds a list",
    ),
    ('{"prompt": ["?"]}', r"role and content in prompt\[0\]"),
    ('{"prompt": [{"role": "bot", "content": "?"}]}', r"prompt\[0\].role, got 'bot'"),
    ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', r"prompt\[0\].content"),
    ('{"prompt": "?", "answer": null}', "answer is empty"),
    ('{"prompt": "?", "answer": NaN}', "answer is empty"),
    ('{"prompt": "?", "reward_model": {"style": "rule"}}', "reward_model.ground_truth"),
    ('{"prompt": "?", "data_source": 3}', "data_source"),
    ('{"prompt": "?", "demonstration": 3}', "demonstration"),
    ('{"prompt": "?", "demonstration": ["2"]}', r"role and content in demonstration\[0\]"),
    ('{"prompt": "\\ud800"}', "surrogate"),
    ("[" * 100_000, "not JSON"),
    ('{"prompt": "?", "answer": ' + "9" * 5_000 + "}", "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, reason):
    path = save(tmp_path / "some.jsonl", [{"prompt": "good"}, "", line])
    with pytest.raises(DataError, match=rf"1 of 2 rows.*\n.*some\.jsonl, line 3: .*{reason}"):
        load("jsonl", path=path)
    tasks = load("jsonl", path=path, skip_bad=0.5)
    assert [t.prompt for t in tasks] == ["good"]
    assert len(tasks.skipped) == 1


def test_bytes_that_are_not_text_are_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "good"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match=r"line 2: it is not JSON"):
        load("jsonl", path=str(tmp_path / "a.jsonl"))


def test_bad_rows_of_parquet(tmp_path, caplog):
    rows = [{"prompt": "good", "answer": "1"}, {"prompt": None, "answer": "2"}, {"prompt": "too", "answer": None}]
    path = save_parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(
        DataError, match=r"2 of 3 rows.*\n.*a\.parquet, row 1: prompt is empty\n.*row 2: answer is empty"
    ):
        load("parquet", path=path, skip_bad=0.5)
    assert len(load("parquet", path=path, skip_bad=0.7)) == 1
    assert "2 of 3 rows" in caplog.text


def test_a_row_without_the_answer_that_others_of_its_source_have_is_bad(tmp_path):
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c", "data_source": "judged"}]
    path = save(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: it has no answer, unlike other rows of 'a'"):
        load("jsonl", path=path)
    assert [task.prompt for task in load("jsonl", path=path, skip_bad=0.5)] == ["a", "c"]


def test_shards_of_a_split_are_one_source(tmp_path):
    save(tmp_path / "train-00000-of-00002.jsonl", [{"prompt": "a", "answer": 1}])
    save(tmp_path / "train-00001-of-00002.jsonl", [{"prompt": "b"}])
    with pytest.raises(DataError, match=r"train-00001-of-00002\.jsonl, line 1: it has no answer, unlike .* 'train'"):
        load("jsonl", path=str(tmp_path))
    save(tmp_path / "train-00001-of-00002.jsonl", [{"prompt": "b", "answer": 2}])
    tasks = load("jsonl", path=str(tmp_path))
    assert [t.source for t in tasks] == ["train", "train"]
    assert [t.id for t in tasks] == ["train-00000-of-00002:0", "train-00001-of-00002:0"]


def test_only_the_first_of_many_bad_rows_are_listed(tmp_path):
    path = save(tmp_path / "a.jsonl", ["{"] * 50)
    with pytest.raises(DataError, match="and 45 more") as caught:
        load("jsonl", path=path)
    assert str(caught.value).count("\n") == 6


def test_a_wrong_column_says_which_there_are(tmp_path):
    path = save_parquet(tmp_path / "a.parquet", [{"question": "?", "gold": 1}])
    with pytest.raises(DataError, match="no column 'prompt'; there are: question, gold"):
        load("parquet", path=path)
    with pytest.raises(OptionError, match=r"columns.*did you mean 'prompt'"):
        load("parquet", path=path, columns={"promt": "question"})


def test_one_id_for_two_rows(tmp_path):
    path = save(tmp_path / "a.jsonl", [{"prompt": "1", "k": "x"}, {"prompt": "2", "k": "x"}])
    with pytest.raises(DataError, match=r"line 2: its id 'x' is taken by .*line 1"):
        load("jsonl", path=path, columns={"id": "k"})


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_missing_file_is_named_with_the_nearest(tmp_path, kind):
    save(tmp_path / f"train.{kind}", [{}])
    with pytest.raises(DataError, match=rf"tran\.{kind}: there is no such file; did you mean train\.{kind}"):
        load(kind, path=str(tmp_path / f"tran.{kind}"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_csv_file_is_named_with_the_command_that_converts_it(tmp_path, kind):
    file = tmp_path / "a.csv"
    file.write_text("prompt,answer\n1+1,2\n")
    with pytest.raises(DataError, match=r"read_csv\('a.csv'\).to_parquet\('a.parquet'\)"):
        load(kind, path=str(file))


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    for content in (b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b"{}\n"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet: it cannot be read as parquet"):
            load("parquet", path=str(tmp_path / "a.parquet"))


def test_files_without_rows_and_without_a_good_row_are_distinguished(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl: there are no rows"):
        load("jsonl", path=save(tmp_path / "a.jsonl", [""]))
    with pytest.raises(DataError, match=r"no row is a valid task\n.*line 1: "):
        load("jsonl", path=save(tmp_path / "a.jsonl", [{"prompt": 1}]), skip_bad=1.0)


def test_wrong_options_are_named(tmp_path):
    path = save(tmp_path / "a.jsonl", [{"prompt": "?"}])
    with pytest.raises(OptionError, match="skip_bad"):
        load("jsonl", path=path, skip_bad=1.5)
    with pytest.raises(OptionError, match="path"):
        load("jsonl")


def test_options_of_rows_are_declared_alike_for_files_and_datasets():
    parquet, jsonl, hub = (component_of(source).options for source in (files.parquet, files.jsonl, files.hub))
    assert [option.name for option in hub[:5]] == ["name", "config", "split", "revision", "columns"]
    assert parquet[2:] == jsonl[2:] == hub[4:]  # name, type, default and help
    assert parquet[1] == jsonl[1]


def test_hub_datasets(tmp_path):
    save_parquet(tmp_path / "train.parquet", [{"question": "2 + 2?", "answer": "4"}])
    task = load("hub", name=str(tmp_path), columns={"prompt": "question"}, chat=True)[0]
    assert (task.prompt[0].content, task.answer, task.id) == ("2 + 2?", "4", "train:0")
    with pytest.raises(DataError, match="split 'dev'"):
        load("hub", name=str(tmp_path), split="dev")
    datasets.Dataset.from_list([{"prompt": "3 + 3?", "answer": "6"}]).save_to_disk(tmp_path / "saved")
    assert [task.answer for task in load("hub", name=str(tmp_path / "saved"))] == ["6"]
    with pytest.raises(DataError, match="holds one split without a name, not 'test'"):
        load("hub", name=str(tmp_path / "saved"), split="test")
    for source in ("parquet", "jsonl"):
        with pytest.raises(
            DataError, match=r"`save_to_disk` of datasets wrote it: read it as \{use: hub, name: .*saved"
        ):
            load(source, path=str(tmp_path / "saved"))


@pytest.mark.parametrize(("offline", "advice"), [
    (True, "Only this machine's cache was read: load it once with a connection to the hub, give `name` a folder"),
    (False, "Without a connection to the hub, set HF_HUB_OFFLINE=1 to read what is in this machine's cache, give"),
])  # fmt: skip
def test_a_dataset_that_cannot_be_read_is_refused_with_what_is_left_to_do(tmp_path, monkeypatch, offline, advice):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(DataError) as caught:
        load("hub", name=str(tmp_path))
    assert advice in str(caught.value)


def test_the_other_kind_of_file_is_named(tmp_path):
    parquet, lines = (
        save_parquet(tmp_path / "a.parquet", [{"prompt": "1"}]),
        save(tmp_path / "a.jsonl", [{"prompt": "1"}]),
    )
    with pytest.raises(DataError, match="is a parquet file; read it with the source `parquet`"):
        load("jsonl", path=parquet)
    with pytest.raises(DataError, match="read JSON lines with the source `jsonl`"):
        load("parquet", path=lines)


def test_tasks_of_files_can_be_pickled(tmp_path):
    parquet = load("parquet", path=save_parquet(tmp_path / "a.parquet", [{"prompt": "1"}, {"prompt": "2"}]))
    jsonl = load("jsonl", path=save(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}]))
    for tasks in (parquet, jsonl):
        assert [t.prompt for t in pickle.loads(pickle.dumps(tasks))] == ["1", "2"]


ROWS = [{"prompt": f"{i}", "answer": "1", "level": {"rate": rate}} for i, rate in enumerate([0.5, 1.0, 0, 0.5])]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_tasks_are_shuffled_unless_their_order_is_to_be_kept(tmp_path, kind):
    path = (save if kind == "jsonl" else save_parquet)(tmp_path / f"a.{kind}", ROWS)

    def trained(**options):
        """Two epochs of training, and the order of an evaluation."""
        tasks = load(kind, path=path, **options)
        stream = TaskStream(tasks, 3, lambda _: 1, 9, "drop")
        return "".join(stream.draw()[0].prompt for _ in range(8)), "".join(task.prompt for task in tasks)

    shuffled, given = trained()
    assert given == "0123" and shuffled != "01230123"
    assert trained(shuffle=False) == ("01230123", "0123")
    assert trained(sort_by="level.rate") == ("20312031", "2031")  # equal ones in the order of the rows
    assert trained(sort_by="-level.rate") == ("10321032", "1032")
    assert load(kind, path=path, sort_by="level.rate")[0].metadata["level"] == {"rate": 0}


def test_a_column_to_sort_by_must_hold_numbers(tmp_path):
    path = save(tmp_path / "a.jsonl", [*ROWS, {"prompt": "4", "answer": "1", "level": {"rate": "high"}}])
    with pytest.raises(DataError, match=r"a.jsonl, line 5: expected a number in level.rate, to sort by, got 'high'"):
        load("jsonl", path=path, sort_by="-level.rate")
    said = r"line 1: sort_by: there is no column 'lvl'; there are: prompt, answer, level"
    with pytest.raises(DataError, match=said) as refused:
        load("jsonl", path=path, sort_by="-lvl")
    assert "columns:" not in str(refused.value)
    assert len(load("jsonl", path=path, sort_by="level.rate", skip_bad=0.2)) == 4


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    file = tmp_path / "a[1].jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    assert len(rlsdk.load("tasks", "jsonl", path=str(file))()) == 1


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_of_objects_is_not_taken_for_lines(tmp_path, indent):
    file = tmp_path / "train.json"
    text = json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=indent)
    file.write_text(text if indent else text.replace("}, ", "},\n"))
    with pytest.raises(DataError, match=r"one JSON value on \d+ lines; write one object per line"):
        rlsdk.load("tasks", "jsonl", path=str(file))()


@pytest.mark.parametrize("column", ["images", "image"])
def test_a_placeholder_of_an_image_in_a_column_is_refused(tmp_path, column):
    file = tmp_path / "train.parquet"
    prompt = [[{"role": "user", "content": "<image>What is this?"}], [{"role": "user", "content": "1 + 1 < 3?"}]]
    pq.write_table(pa.table({"prompt": prompt, "answer": ["x", "y"], column: [[b"PNG"], [b"PNG"]]}), file)
    with pytest.raises(DataError, match=rf"1 of 2 rows(.|\n)*the column '{column}' is not read"):
        rlsdk.load("tasks", "parquet", path=str(file))()
