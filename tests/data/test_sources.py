"""Files, directories and functions that rows come from, and what reaches a prompt:
tools, messages, system prompt.
"""

import datetime
import decimal
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_stare.config import DataConfig, UserError
from megatron_stare.data.prompts import load_prompts
from megatron_stare.data.rows import Dropped, read_rows
from tests.tiny_models import byte_tokenizer

ROWS = [{"prompt": f"{number} + 1 =", "label": str(number + 1)} for number in range(5)]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}},
}
NEGATE = {"type": "function", "function": {"name": "negate"}}


def user_rows():
    """A user's own source."""
    return iter(ROWS)


NOT_A_FUNCTION = 7


def labels(source, **config):
    return [row.label for row in read_rows(str(source), DataConfig(**config), Dropped())]


def refusal(source, **config):
    with pytest.raises(UserError) as caught:
        labels(source, **config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_arrow(path, rows, writer=pyarrow.ipc.new_stream):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, writer(file, table.schema) as out:
        out.write_table(table, max_chunksize=2)


def write_hugging_face(path, rows):
    """The files of datasets.Dataset.save_to_disk: two shards in the order of state.json, which is
    not the order of their names.
    """
    write_arrow(path / "b.arrow", rows[:3])
    write_arrow(path / "a.arrow", rows[3:])
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]})
    )
    (path / "dataset_info.json").write_text("{}")


ALL = ["1", "2", "3", "4", "5"]


def test_hugging_face_directory(tmp_path):
    write_hugging_face(tmp_path / "saved", ROWS)
    assert labels(tmp_path / "saved") == ALL


def test_hugging_face_splits(tmp_path):
    write_hugging_face(tmp_path / "saved/train", ROWS)
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    assert labels(tmp_path / "saved") == ALL
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "train, test; name one" in refusal(tmp_path / "saved")


def test_hugging_face_directory_without_one_of_its_files(tmp_path):
    write_hugging_face(tmp_path / "saved", ROWS)
    (tmp_path / "saved/a.arrow").unlink()
    assert "a.arrow" in refusal(tmp_path / "saved")


def test_both_arrow_formats(tmp_path):
    write_arrow(tmp_path / "stream.arrow", ROWS)
    write_arrow(tmp_path / "file.arrow", ROWS, pyarrow.ipc.new_file)
    assert labels(tmp_path / "stream.arrow") == labels(tmp_path / "file.arrow") == ALL


def test_damaged_arrow(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"no arrow at all, but long enough to look at")
    assert "a.arrow is not a readable arrow file" in refusal(tmp_path / "a.arrow")


@pytest.mark.parametrize("folder", ["", "data"])
def test_directory_of_shards(folder, tmp_path):
    write_parquet(tmp_path / folder / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / folder / "train-00001-of-00002.parquet", ROWS[2:])
    (tmp_path / "README.md").write_text("a card")
    assert labels(tmp_path) == ALL


def test_a_missing_shard_and_a_second_split_are_refused(tmp_path):
    write_parquet(tmp_path / "train-00000-of-00003.parquet", ROWS)
    assert "1 of 3 shards" in refusal(tmp_path)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", ROWS)
    assert "test, train" in refusal(tmp_path)


def test_a_directory_without_rows(tmp_path):
    assert "holds no .parquet" in refusal(tmp_path)


def test_several_files_in_their_order(tmp_path):
    write_lines(tmp_path / "z.jsonl", ROWS[:2])
    write_parquet(tmp_path / "a.parquet", ROWS[2:])
    assert labels(f"{tmp_path / 'z.jsonl'}, {tmp_path / 'a.parquet'}") == ALL


def test_an_error_names_the_file_of_several(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "b.jsonl", [*ROWS, {"prompt": "x"}])
    message = refusal(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}")
    assert f"{tmp_path / 'b.jsonl'}, row 6" in message


def test_a_comma_in_a_name(tmp_path):
    write_lines(tmp_path / "a,b.jsonl", ROWS)
    assert labels(tmp_path / "a,b.jsonl") == ALL


def test_json_array(tmp_path):
    (tmp_path / "a.json").write_text("  " + json.dumps(ROWS, indent=1))
    assert labels(tmp_path / "a.json") == ALL
    write_lines(tmp_path / "b.json", ROWS)
    assert labels(tmp_path / "b.json") == ALL
    (tmp_path / "a.json").write_text("[1, 2")
    assert "not a JSON array" in refusal(tmp_path / "a.json")


def test_a_users_function():
    assert labels("tests.data.test_sources.user_rows") == ALL
    assert "has no 'nothing'" in refusal("tests.data.test_sources.nothing")
    assert "cannot be imported" in refusal("no_such_package.rows")
    assert "not callable" in refusal("tests.data.test_sources.NOT_A_FUNCTION")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"prompt": "1", "label": "\xff"}\n' + json.dumps(ROWS[0]).encode()
    )
    assert "row 1: is not UTF-8" in refusal(tmp_path / "a.jsonl")
    assert labels(tmp_path / "a.jsonl", on_bad_row="skip") == ["1"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    for name, text in (("a.jsonl", json.dumps(ROWS[0])), ("a.json", json.dumps(ROWS[:1]))):
        (tmp_path / name).write_text(text + "\r\n", encoding="utf-8-sig")
        assert labels(tmp_path / name) == ["1"]


def test_a_label_of_another_type_is_kept_as_json(tmp_path):
    write_lines(
        tmp_path / "a.jsonl",
        [ROWS[0] | {"label": label} for label in (4, 0.5, True, ["a", 1], {"b": None})],
    )
    assert labels(tmp_path / "a.jsonl") == ["4", "0.5", "true", '["a", 1]', '{"b": null}']


def test_decimals_and_dates_of_a_table_are_text_and_bytes_are_refused(tmp_path):
    values = {"d": decimal.Decimal("4.50"), "t": datetime.date(2026, 1, 2), "b": b"4"}
    found = {}
    for name, value in values.items():
        table = pyarrow.Table.from_pylist([ROWS[0] | {"label": value}])
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        if name != "b":
            found[name] = labels(tmp_path / f"{name}.parquet")
    assert found == {"d": ["4.50"], "t": ["2026-01-02"]}
    with pytest.raises(UserError, match="the label is bytes; store the column as text"):
        labels(tmp_path / "b.parquet")


# --- what reaches the prompt
# ------------------------------------------------------------------------------------------


def prompts(path, rows, write=write_lines, **config):
    write(path, rows)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return load_prompts(str(path), tokenizer, DataConfig(**config))[0]


CHAT = {"prompt": [{"role": "user", "content": "2 + 2?"}], "label": "4"}


@pytest.mark.parametrize("write", [write_lines, write_parquet])
@pytest.mark.parametrize("encode", [list, json.dumps])
def test_tools_reach_template_and_prompt(write, encode, tmp_path):
    (prompt,) = prompts(tmp_path / f"a{'.jsonl' if write is write_lines else '.parquet'}", [
        CHAT | {"tools": encode([ADD, NEGATE])}
    ], write)  # fmt: skip
    assert prompt.text == "[add][negate]<user>2 + 2?<assistant>"
    assert prompt.tools == (ADD, NEGATE)
    assert prompt.messages == ({"role": "user", "content": "2 + 2?"},)


@pytest.mark.parametrize("tools", ["{not json", "{}", [1], 7])
def test_bad_tools(tools, tmp_path):
    with pytest.raises(UserError, match=r"row 1: field 'tools'"):
        prompts(tmp_path / "a.jsonl", [CHAT | {"tools": tools}])


def test_a_system_prompt_goes_before_rows_that_have_none(tmp_path):
    own = {"prompt": [{"role": "system", "content": "own"}, *CHAT["prompt"]], "label": "4"}
    found = prompts(tmp_path / "a.jsonl", [CHAT, own], system_prompt="think")
    assert [prompt.text for prompt in found] == [
        "<system>think<user>2 + 2?<assistant>",
        "<system>own<user>2 + 2?<assistant>",
    ]
    assert found[0].messages[0] == {"role": "system", "content": "think"}


def test_text_becomes_a_message_where_asked(tmp_path):
    assert (
        prompts(tmp_path / "a.jsonl", ROWS[:1], wrap_text=True)[0].text
        == "<user>0 + 1 =<assistant>"
    )
    assert prompts(tmp_path / "a.jsonl", ROWS[:1])[0].messages == ()
    for config, row in (({"system_prompt": "think"}, {}), ({}, {"tools": [ADD]})):
        with pytest.raises(UserError, match=r"data.wrap_text=true"):
            prompts(tmp_path / "a.jsonl", [ROWS[0] | row], **config)


def test_a_message_that_only_calls_a_tool(tmp_path):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    turns = [*CHAT["prompt"], {"role": "assistant", "content": None, "tool_calls": calls}]
    (prompt,) = prompts(tmp_path / "a.jsonl", [{"prompt": turns, "label": "4"}])
    assert prompt.messages[1]["tool_calls"] == calls


def test_paths_of_the_package_are_not_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "does not exist" in refusal("rows.jsonl")
    assert not Path("rows.jsonl").exists()
