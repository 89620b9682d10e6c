"""Rows in slime's and verl's formats, what is wrong with a bad one,
and the order in which prompts are drawn.
"""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_stare.config import DataConfig, UserError
from megatron_stare.data.prompts import PromptStream, load_prompts
from megatron_stare.data.rows import Dropped, read_rows
from megatron_stare.records import Prompt
from tests.paths import MATH
from tests.tiny_models import byte_tokenizer

MESSAGES = [{"role": "system", "content": "think"}, {"role": "user", "content": "2 + 2?"}]
SLIME = {"prompt": "2 + 2 =", "label": "4", "metadata": {"level": 1}}
SLIME_CHAT = {"prompt": MESSAGES, "label": 4}
VERL = {
    "prompt": MESSAGES,
    "data_source": "arithmetic",
    "reward_model": {"ground_truth": "4", "style": "rule"},
    "extra_info": {"index": 12},
}


def jsonl(path, rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(path)


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture(params=[jsonl, parquet])
def write(request, tmp_path):
    """Rows -> the path of a file, once as .jsonl and once as .parquet."""
    return lambda rows: request.param(tmp_path / f"rows.{request.param.__name__}", rows)


def read(path, **config):
    """All usable rows, and how many were dropped."""
    dropped = Dropped()
    rows = list(read_rows(path, DataConfig(**config), dropped))
    return rows, dropped.total


def one(path, **config):
    rows, skipped = read(path, **config)
    assert len(rows) == 1
    assert skipped == 0
    return rows[0]


def refusal(path, tokenizer=None, **config):
    """The one line with which the file is refused."""
    settings = DataConfig(**config)
    with pytest.raises(UserError) as caught:
        _ = read(path, **config) if tokenizer is None else load_prompts(path, tokenizer, settings)
    message = str(caught.value)
    assert "\n" not in message
    assert path in message
    return message


def test_slime_text(write):
    row = one(write([SLIME]))
    assert (row.prompt, row.label, row.metadata) == ("2 + 2 =", "4", {"level": 1})


def test_slime_chat_with_a_number_for_a_label(write):
    row = one(write([SLIME_CHAT]))
    assert (row.prompt, row.label, row.metadata) == (MESSAGES, "4", {})


def test_verl(write):
    row = one(write([VERL]))
    metadata = {"index": 12, "data_source": "arithmetic"}
    assert (row.prompt, row.label, row.metadata) == (MESSAGES, "4", metadata)


@pytest.mark.parametrize(
    ("row", "key", "source"),
    [
        (VERL, "data_source", "arithmetic"),
        (SLIME | {"kind": "sums"}, "kind", "sums"),
        (SLIME | {"metadata": {"rm_type": "math"}}, "rm_type", "math"),
        (VERL | {"extra_info": {"data_source": "other"}}, "data_source", "arithmetic"),
        (SLIME | {"metadata": {"data_source": "own"}}, "data_source", "own"),
        (SLIME | {"kind": None}, "kind", None),
        (VERL, "kind", None),
    ],
)
def test_the_data_set_of_a_row_is_in_its_metadata(row, key, source, write):
    assert one(write([row]), source_key=key).metadata.get("data_source") == source


@pytest.mark.parametrize("key", ["metadata", "extra_info"])
def test_metadata_may_be_json_text_as_tools_may(key, write):
    assert one(write([SLIME | {"metadata": None, key: '{"level": [1]}'}])).metadata == {
        "level": [1]
    }
    assert one(write([SLIME | {"metadata": None, key: ""}])).metadata == {}


def test_a_label_comes_before_the_ground_truth(write):
    assert one(write([VERL | {"label": "5"}])).label == "5"


def test_the_keys_are_configurable(write):
    row = one(
        write([{"question": "1 + 1", "answer": "2", "extra": {"a": "b"}}]),
        input_key="question",
        label_key="answer",
        metadata_key="extra",
    )
    assert (row.prompt, row.label, row.metadata) == ("1 + 1", "2", {"a": "b"})


def test_text_beyond_ascii_survives(write):
    assert (
        one(write([{"prompt": "\u221a2 \u00d7 \U0001d465", "label": "\u03c0"}])).prompt
        == "\u221a2 \u00d7 \U0001d465"
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"label": "4"}, ["'prompt'", "label"]),
        ({"prompt": "2 + 2"}, ["'label'", "reward_model.ground_truth"]),
        ({"prompt": "2 + 2", "reward_model": {"style": "rule"}}, ["reward_model.ground_truth"]),
        ({"prompt": "", "label": "4"}, ["'prompt'"]),
        ({"prompt": [], "label": "4"}, ["'prompt'"]),
        ({"prompt": None, "label": "4"}, ["'prompt'"]),
        ({"prompt": [{"content": "2 + 2"}], "label": "4"}, ["'prompt'", "role"]),
        ({"prompt": [{"role": "user"}], "label": "4"}, ["'prompt'", "content"]),
        ({"prompt": ["2 + 2"], "label": "4"}, ["'prompt'", "role"]),
        ({"prompt": [{"role": "user", "content": None}], "label": "4"}, ["'prompt'", "content"]),
        ({"prompt": "2 + 2", "label": "4", "metadata": [1]}, ["'metadata'"]),
        ({"prompt": "2 + 2", "label": "4", "metadata": []}, ["'metadata'"]),
        ({"prompt": "2 + 2", "label": "4", "metadata": "[1]"}, ["'metadata'", "list"]),
        ({"prompt": "2 + 2", "label": "4", "extra_info": "x"}, ["extra_info", "no JSON"]),
        ([1, 2], []),
        ("{not json\n", []),
        ("7\n", []),
    ],
)
def test_a_bad_row_names_file_row_and_field_or_is_skipped_and_counted(row, words, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [SLIME, row, SLIME])
    message = refusal(path)
    assert "row 2" in message
    assert "data.on_bad_row=skip" in message
    for word in words:
        assert word in message
    rows, skipped = read(path, on_bad_row="skip")
    assert (len(rows), skipped) == (2, 1)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_file_may_begin_with_a_byte_order_mark(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    text = json.dumps(SLIME) if suffix == "jsonl" else json.dumps([SLIME])
    path.write_text(text, encoding="utf-8-sig")
    assert one(str(path)).label == "4"


@pytest.mark.parametrize(
    "row",
    [
        SLIME | {"prompt": "2\ud83d"},
        SLIME | {"prompt": [{"role": "user", "content": "2\ud83d"}]},
    ],
)
def test_half_of_a_surrogate_pair_is_a_bad_row(row, tmp_path):
    path, tokenizer = jsonl(tmp_path / "a.jsonl", [SLIME, row]), byte_tokenizer()
    with pytest.raises(UserError, match=r"row 2: .* \\ud83d, half of a surrogate pair"):
        load_prompts(path, tokenizer, DataConfig())
    prompts, dropped = load_prompts(path, tokenizer, DataConfig(on_bad_row="skip"))
    assert (len(prompts), dropped.total) == (1, 1)


def test_blank_lines_are_skipped(tmp_path):
    rows, skipped = read(jsonl(tmp_path / "a.jsonl", [SLIME, "\n", "  \n", SLIME]))
    assert (len(rows), skipped) == (2, 0)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(content, tmp_path):
    assert "no usable row" in refusal(jsonl(tmp_path / "a.jsonl", [content]))


def test_a_file_without_a_usable_row_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert "2 skipped" in refusal(path, on_bad_row="skip")


def test_a_missing_file_is_refused(tmp_path):
    assert "does not exist" in refusal(str(tmp_path / "a.jsonl"))


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,label\n")
    assert "'.csv'" in refusal(str(tmp_path / "a.csv"))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = parquet(tmp_path / "a.parquet", [SLIME] * 50)
    Path(path).write_bytes(Path(path).read_bytes()[:-20])
    assert "parquet" in refusal(path)


# --- prompts
# --------------------------------------------------------------------------------------------------


def test_text_is_encoded_as_it_stands_and_messages_through_the_template(tmp_path):
    tokenizer = byte_tokenizer()
    prompts, dropped = load_prompts(
        jsonl(tmp_path / "a.jsonl", [SLIME, VERL]), tokenizer, DataConfig()
    )
    assert dropped.total == 0
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert [tokenizer.decode(prompt.token_ids) for prompt in prompts] == [
        prompt.text for prompt in prompts
    ]
    assert prompts[0].text == "2 + 2 ="
    assert prompts[1].text == "<system>think\n<user>2 + 2?\n<assistant>"
    metadata = {"index": 12, "data_source": "arithmetic"}
    assert (prompts[1].label, prompts[1].metadata) == ("4", metadata)


def test_messages_may_be_json_text(tmp_path):
    """As in tables, whose columns give every message the fields of all others."""
    rows = [VERL, VERL | {"prompt": json.dumps(VERL["prompt"])}]
    rows += [SLIME | {"prompt": '[{"x": 1}] is a list. What is x?'}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    (first, second, third), _ = load_prompts(path, byte_tokenizer(), DataConfig())
    assert first.text == second.text and first.messages == second.messages
    assert third.text == rows[2]["prompt"]
    torn = VERL | {"prompt": '[{"role": "user", "content": "2'}
    assert "field 'prompt' is text but no JSON" in refusal(jsonl(tmp_path / "b.jsonl", [torn]))


def test_messages_need_a_chat_template(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [SLIME, SLIME_CHAT])
    assert "row 2" in refusal(path, byte_tokenizer(chat=False))
    assert "data.apply_chat_template" in refusal(path, byte_tokenizer(), apply_chat_template=False)


def test_a_long_prompt_is_refused_or_skipped_but_never_cut(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [SLIME, {"prompt": "x" * 30, "label": "1"}, SLIME])
    message = refusal(path, byte_tokenizer(), rollout_max_prompt_len=20)
    assert "row 2" in message
    assert "30 tokens" in message
    assert "data.rollout_max_prompt_len=20" in message
    prompts, dropped = load_prompts(
        path, byte_tokenizer(), DataConfig(rollout_max_prompt_len=20, on_bad_row="skip")
    )
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert dropped.counts == {"over data.rollout_max_prompt_len": 1}
    assert "row 2: the prompt has 30 tokens" in str(dropped)
    prompts, _ = load_prompts(path, byte_tokenizer(), DataConfig(rollout_max_prompt_len=30))
    assert [len(prompt.token_ids) for prompt in prompts] == [7, 30, 7]


def test_the_row_number_counts_skipped_rows_too(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["\n", SLIME, "\n", SLIME_CHAT])
    assert "row 4" in refusal(path, byte_tokenizer(chat=False))


def test_a_template_that_refuses_a_conversation_is_a_bad_row(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = jsonl(tmp_path / "a.jsonl", [SLIME, SLIME_CHAT])
    assert "row 2" in refusal(path, tokenizer)
    assert load_prompts(path, tokenizer, DataConfig(on_bad_row="skip"))[1].total == 1


def test_a_file_with_only_long_prompts_is_refused(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [SLIME])
    assert "every row was dropped" in refusal(
        path, byte_tokenizer(), rollout_max_prompt_len=2, on_bad_row="skip"
    )


# --- the stream
# --------------------------------------------------------------------------------------------------


def stream(size=7, seed=0, shuffle=True):
    prompts = [Prompt(n, (n,), str(n), f"text {n}", {"n": n}) for n in range(size)]
    return PromptStream(prompts, seed, shuffle)


def labels(prompts):
    return [int(prompt.label) for prompt in prompts]


def test_every_epoch_is_another_permutation():
    drawn = labels(stream().draw(7 * 30))
    epochs = [tuple(drawn[start : start + 7]) for start in range(0, 210, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) > 25


def test_the_sizes_of_the_draws_do_not_matter():
    whole, parts = stream(), stream()
    pieces = [labels(parts.draw(count)) for count in (1, 5, 9, 0, 20)]
    assert labels(whole.draw(35)) == [label for piece in pieces for label in piece]
    assert whole.position == parts.position == 35


@pytest.mark.parametrize("position", [0, 3, 7, 19])
def test_the_position_is_the_whole_state(position):
    whole, resumed = stream(), stream()
    expected = whole.draw(40)[position:]
    resumed.position = position
    assert resumed.draw(40 - position) == expected


def test_a_stream_may_return_to_an_earlier_position():
    stepped = stream()
    first = stepped.draw(10)
    stepped.position = 0
    assert stepped.draw(10) == first


def test_the_seed_changes_the_order():
    orders = {tuple(labels(stream(seed=seed).draw(7))) for seed in range(20)}
    assert len(orders) > 15
    assert labels(stream(seed=4).draw(30)) == labels(stream(seed=4).draw(30))


def test_without_shuffling_the_file_order_repeats():
    assert labels(stream(size=3, shuffle=False).draw(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_drawn_prompt_has_its_draw_number_and_all_fields():
    for number, prompt in enumerate(stream().draw(20)):
        n = int(prompt.label)
        assert prompt == Prompt(number, (n,), str(n), f"text {n}", {"n": n})


# --- real files
# --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not MATH.is_dir(), reason="no ../shared/data/math here")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("aime24", 30),
        ("aime25", 30),
        ("amc23", 40),
        ("dapo17k_first2000", 2000),
        ("gsm8k_test_first400", 400),
        ("math500", 500),
    ],
)
def test_every_row_of_the_mathematics_files_is_usable(name, count):
    config = DataConfig(rollout_max_prompt_len=20_000)
    prompts, dropped = load_prompts(str(MATH / f"{name}.parquet"), byte_tokenizer(), config)
    assert (len(prompts), dropped.total) == (count, 0)
    assert all(
        prompt.label and len(prompt.token_ids) and prompt.text.endswith("<assistant>")
        for prompt in prompts
    )


def test_a_missing_value_of_a_table_is_no_label(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [SLIME | {"label": float("nan")}])
    assert "row 1: has neither 'label' nor" in refusal(path)
