"""Duplicates, evaluation problems in the training data, and how a mixture draws."""

import json
from collections import Counter

import pytest

from megatron_stare.config import Config, UserError, dump, load, override
from megatron_stare.data.mixture import BLOCK, Mixture, shares, training_stream
from megatron_stare.data.rows import Dropped, Row
from megatron_stare.data.screening import Screen, normalised
from megatron_stare.records import Prompt
from tests.tiny_models import byte_tokenizer


def rows(*questions, label="1"):
    return [Row(number, question, label, {}) for number, question in enumerate(questions, start=1)]


def kept(screen, given):
    dropped = Dropped()
    return [row.prompt for row in screen.kept(given, dropped)], dict(dropped.counts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find  $x+1$.\n", "find $ x + 1 $."),
        (r"\dfrac{1}{2}", r"\frac 1 2".replace("1 2", "{1}{2}")),
        (r"\(a \le b\)", r"$a\leq b$"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\ \tfrac{\pi}{2})"),
        (r"a \quad b~c\,d", "a b c d"),
        ("\ufb01nd", "find"),
    ],
)
def test_rewritten_duplicates_are_equal(one, other):
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"a \le b", r"a \ge b"),
        ("x + 1", "x - 1"),
        (r"\frac{1}{2}", r"\frac{2}{1}"),
        ("Think. 2 + 2", "2 + 2"),
        (r"\leftarrow a", "arrow a"),
        (r"\neq", r"\eq"),
    ],
)
def test_different_problems_are_not_equal(one, other):
    assert normalised(one) != normalised(other)


def test_exact_and_normalised_duplicates():
    given = rows("2 + 2?", "2 + 2?", "2+2?", "3 + 3?")
    assert kept(Screen("none"), given) == (["2 + 2?", "2 + 2?", "2+2?", "3 + 3?"], {})
    assert kept(Screen("exact"), given) == (["2 + 2?", "2+2?", "3 + 3?"], {"duplicate": 1})
    assert kept(Screen("normalised"), given) == (["2 + 2?", "3 + 3?"], {"duplicate": 2})


def test_a_duplicate_with_another_label_is_counted_apart():
    given = [*rows("2 + 2?"), *rows("2 + 2?", label="5")]
    assert kept(Screen("exact"), given) == (["2 + 2?"], {"duplicate with another label": 1})


def test_only_user_messages_are_compared():
    with_system = Row(
        2, [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}], "1", {}
    )
    assert kept(Screen("exact"), [*rows("2 + 2?"), with_system])[1] == {"duplicate": 1}


ASKED = "Every morning Aya goes for a $9$-kilometer-long walk and stops at a coffee shop."


def test_evaluation_problems_are_found_inside_other_words():
    given = rows(
        "2 + 2?",
        f"Solve step by step.\n\n{ASKED.upper()}\n\nAnswer in a box.",
        "2+2?",
        "12 + 2?",
        ASKED[:60],
    )
    screen = Screen(evaluated=[ASKED, "2 + 2?"], drop_evaluated=True)
    assert kept(screen, given) == (["12 + 2?", ASKED[:60]], {"in the evaluation data": 3})
    screen = Screen(evaluated=[ASKED, "2 + 2?"])
    assert (len(kept(screen, given)[0]), screen.evaluated_rows) == (5, 3)


# --- mixtures
# --------------------------------------------------------------------------------------------------


def mixture(sizes=(7, 300, 11), weights=(1, 2, 0.5), seed=0, shuffle=True):
    sources = [
        [Prompt(n, (n,), str(n), f"text {place}") for n in range(size)]
        for place, size in enumerate(sizes)
    ]
    return Mixture(sources, weights, seed, shuffle)


def test_every_block_has_each_source_in_proportion():
    drawn = mixture().draw(3 * BLOCK)
    for start in range(0, 3 * BLOCK, BLOCK):
        counts = Counter(prompt.text for prompt in drawn[start : start + BLOCK])
        assert [counts[f"text {place}"] for place in range(3)] == [286, 571, 143]
    assert [prompt.index for prompt in drawn] == list(range(3 * BLOCK))


def test_each_source_goes_through_its_own_epochs():
    drawn = mixture().draw(3 * BLOCK)
    for place, size in enumerate((7, 300, 11)):
        own = [prompt.label for prompt in drawn if prompt.text == f"text {place}"]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(map(int, epoch)) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 0.9 * len(epochs)


@pytest.mark.parametrize("position", [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 17])
def test_the_position_is_the_whole_state(position):
    whole, resumed = mixture(), mixture()
    expected = whole.draw(2 * BLOCK + 50)[position:]
    resumed.position = position
    assert resumed.draw(len(expected)) == expected
    assert mixture().at(position) == whole.at(position)


def test_the_seed_decides_the_order():
    assert mixture(seed=1).draw(50) == mixture(seed=1).draw(50) != mixture(seed=2).draw(50)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1], [1000]),
        ([1, 1, 1], [334, 333, 333]),
        ([1e9, 1], [999, 1]),
        ([0.3, 0.7], [300, 700]),
        ([1e9, 1, 1, 1], [997, 1, 1, 1]),
    ],
)
def test_shares_follow_the_weights_of_sources(weights, expected):
    assert shares(weights) == expected


def test_a_config_becomes_draws(tmp_path):
    easy, hard, held = tmp_path / "easy.jsonl", tmp_path / "hard.jsonl", tmp_path / "held.jsonl"

    def write(path, numbers):
        found = [{"prompt": f"What is {n} + 1?", "label": str(n + 1)} for n in numbers]
        path.write_text("".join(json.dumps(row) + "\n" for row in found))

    write(easy, [*range(10), 3])
    write(hard, range(8, 100))
    write(held, [20, 21])
    config = override(
        Config(),
        [
            f"data.sources={{{easy}: 3, {hard}: 1}}",
            "data.deduplicate=normalised",
            f"evaluation.eval_data.held={held}",
        ],
    )
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    stream, lines = training_stream(config, byte_tokenizer())
    assert lines == [
        f"{easy}: 1 rows skipped, 10 used: 1 duplicate (first: row 11)",
        f"{hard}: 2 rows skipped, 90 used: 2 duplicate (first: row 1)",
        "warning: 2 training rows ask what a row of held asks; data.drop_evaluation_prompts=true "
        "leaves them out",
        f"{easy}: weight 3, 75.0% of the draws from 10 prompts",
        f"{hard}: weight 1, 25.0% of the draws from 90 prompts",
    ]
    assert sum(int(prompt.label) <= 10 for prompt in stream.draw(BLOCK)) == 750
    stream, lines = training_stream(
        override(config, ["data.drop_evaluation_prompts=true"]), byte_tokenizer()
    )
    assert "2 in the evaluation data (first: row 13)" in lines[1]
    assert {"21", "22"}.isdisjoint(prompt.label for prompt in stream.prompts)


# --- pass rates
# --------------------------------------------------------------------------------------------------


def rated(directory, *overrides, rates=None):
    """The settings of a run on five problems, of which four have a pass rate."""
    problems, profile = directory / "problems.jsonl", directory / "profile.jsonl"
    rows = [{"prompt": f"What is {n}?", "label": str(n)} for n in range(5)]
    rates = rates or [
        {"prompt": f"What is {n}?", "label": str(n), "correct": correct, "k": 4}
        for n, correct in ((0, 0), (1, 1), (2, 3), (3, 4))
    ]
    for path, found in ((problems, rows), (profile, rates)):
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    settings = [f"data.prompt_data={problems}", f"data.pass_rates={profile}", *overrides]
    return override(Config(), settings)


def test_prompts_are_chosen_by_their_pass_rate(tmp_path):
    config = rated(tmp_path, "data.min_pass_rate=0.25", "data.max_pass_rate=0.75")
    stream, (line,) = training_stream(config, byte_tokenizer())
    assert [(prompt.label, prompt.index) for prompt in stream.prompts] == [("1", 0), ("2", 1)]
    assert line.endswith(
        "3 rows skipped, 2 used: "
        "1 below data.min_pass_rate (first: row 1: 0 of 4 responses are correct); "
        "1 above data.max_pass_rate (first: row 4: 4 of 4 responses are correct); "
        "1 without a row in data.pass_rates (first: row 5)"
    )
    stream, _ = training_stream(rated(tmp_path, "data.max_pass_rate=0.99"), byte_tokenizer())
    assert [prompt.label for prompt in stream.prompts] == ["0", "1", "2"]


def test_rows_of_one_problem_are_added_up_and_another_label_is_another_problem(tmp_path):
    row = {"prompt": "What is 0?", "label": "0"}
    rates = [row | {"correct": 4, "k": 4}, row | {"correct": 0, "k": 4, "label": "other"}]
    stream, _ = training_stream(
        rated(tmp_path, "data.min_pass_rate=0.9", rates=rates), byte_tokenizer()
    )
    assert [prompt.label for prompt in stream.prompts] == ["0"]
    config = rated(tmp_path, "data.min_pass_rate=0.9", rates=[*rates, row | {"correct": 0, "k": 1}])
    with pytest.raises(UserError, match=r"every row was dropped .*4 of 5 responses are correct"):
        training_stream(config, byte_tokenizer())


@pytest.mark.parametrize(
    ("overrides", "rates", "words"),
    [
        (["data.max_pass_rate=1"], None, "every one; set data.min_pass_rate=0.1"),
        (["data.min_pass_rate=0.5", "data.max_pass_rate=0.4"], None, "none; set"),
        (["data.pass_rates=", "data.max_pass_rate=0.4"], None, "no effect without data.pass_rates"),
        (["data.max_pass_rate=0.9"], [{"prompt": "x"}], "row 1: lacks 'label'; give the problems"),
        (["data.max_pass_rate=0.9"], [["x"]], "profile.jsonl, row 1: has another form; give"),
        (["data.max_pass_rate=0.9"], [{"prompt": ["x"], "label": "1"}], "row 1: has another form"),
        (["data.max_pass_rate=0.9", "data.pass_rates=no.jsonl"], None, "rates=no.jsonl does not"),
    ],
)
def test_bad_pass_rates_are_refused(overrides, rates, words, tmp_path):
    with pytest.raises(UserError, match=words):
        training_stream(rated(tmp_path, *overrides, rates=rates), byte_tokenizer())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sources={a.jsonl: 0}"], r"must lie in \(0, inf\)"),
        (["data.sources={a.jsonl: -1}"], r"must lie in \(0, inf\)"),
        (["data.sources={a.jsonl: 1}", "data.prompt_data=b.jsonl"], "set data.prompt_data="),
        (["data.sources={a.jsonl: many}"], "data.sources"),
        (["data.deduplicate=fuzzy"], "none, exact, normalised"),
    ],
)
def test_bad_settings_are_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        override(Config(), overrides)
