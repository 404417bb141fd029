"""lm-eval runs for real, on local tasks: its scores are the naive ones, and a trained model beats chance."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tokenizers import processors

from permtriton.errors import TaskError
from permtriton.evaluation import tasks as library
from permtriton.evaluation.evaluate import measure_model
from permtriton.evaluation.tasks import Tasks
from permtriton.util.progress import EventProgress

from . import zoo
from .lm_tasks import CHOICE, QUESTIONS, TEXTS, datasets_cache, write_task, write_tasks  # noqa: F401 (a fixture)
from .sentences import image_and_text_processor, trained_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples" / "tasks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("lm") / "tasks")


@pytest.fixture(scope="module")
def tokenizer():
    return trained_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return zoo.tiny_llama(vocab_size=len(tokenizer), initializer_range=0.4)


@torch.no_grad()
def log_probability(model, context: list[int], continuation: list[int]) -> float:
    scores = model(input_ids=torch.tensor([context + continuation])).logits[0].double().log_softmax(-1)
    return sum(float(scores[len(context) - 1 + i, token]) for i, token in enumerate(continuation))


# -- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_multiple_choice_is_the_naive_one(folder, model, tokenizer, batch):
    (result,) = Tasks(["foxes"], folder=folder).run(model, tokenizer, batch)
    right = normed = 0
    for row in QUESTIONS:
        context = tokenizer(row["context"])["input_ids"]
        scores = [
            log_probability(model, context, tokenizer(row["context"] + choice)["input_ids"][len(context) :])
            for choice in row["choices"]
        ]
        lengths = [len(choice) for choice in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
        per_letter = [score / length for score, length in zip(scores, lengths, strict=True)]
        normed += per_letter.index(max(per_letter)) == row["answer"]
    assert 0 < right < len(QUESTIONS), "some right, some wrong"
    assert (result.name, result.version, result.shots, result.samples) == ("foxes", "3.0", 0, 4)
    assert {name: score.value for name, score in result.scores.items()} == {"acc": right / 4, "acc_norm": normed / 4}
    share = right / 4
    assert result.scores["acc"].stderr == pytest.approx(math.sqrt(share * (1 - share) / 3))


def test_a_text_is_scored_as_the_naive_sum(folder, model, tokenizer):
    (result,) = Tasks(["dogs"], folder=folder).run(model, tokenizer)
    total = size = 0.0
    for row in TEXTS:
        total -= log_probability(model, [tokenizer.eos_token_id], tokenizer(row["text"])["input_ids"])
        size += len(row["text"].encode())
    score = result.scores["bits_per_byte"]
    assert score.value == pytest.approx(total / size / math.log(2), rel=1e-5)
    assert score.stderr is None


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_special_tokens_stand_before_a_question_once_and_after_it_never(folder, template):
    """lm-eval puts a token before a text that is scored as a whole, and takes what a tokenizer adds for text."""
    tokenizer = trained_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "</s>"]})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
    model = zoo.tiny_llama(vocab_size=len(tokenizer), initializer_range=0.4)
    (choice,), (text,) = (Tasks([name], folder=folder).run(model, tokenizer) for name in ("foxes", "dogs"))
    begin, right = ids[0][1], 0

    def score(context: str, answer: str) -> float:
        before, whole = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (context, context + answer))
        return log_probability(model, [begin, *before], whole[len(before) :])

    for row in QUESTIONS:
        scores = [score(row["context"], each) for each in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    assert choice.scores["acc"].value == right / 4
    total = sum(-score("", row["text"]) for row in TEXTS) / sum(len(row["text"]) for row in TEXTS)
    assert text.scores["bits_per_byte"].value == pytest.approx(total / math.log(2), rel=1e-5)


def test_tasks_are_made_of_any_paragraphs(tmp_path, model, tokenizer):
    import runpy

    words = [[f"{place}-{number}" for place in range(60)] for number in range(200)]
    for paragraph in words:
        paragraph[3] = paragraph[45] = "again"
    made = runpy.run_path(str(EXAMPLES.parent / "make_tasks.py"))
    made["write_tasks"]("\n".join([" = Heading = ", *map(" ".join, words)]), tmp_path / "tasks")
    continued = [json.loads(line) for line in (tmp_path / "tasks/continuation.jsonl").read_text().splitlines()]
    assert len(continued) == 100
    for row in continued:
        whole = row["context"] + row["choices"][row["answer"]]
        assert [whole + " " in " ".join(paragraph) for paragraph in words].count(True) == 1
        assert len({choice.split()[0].split("-")[1] for choice in row["choices"]}) == 4, "of other paragraphs"
    asked = [json.loads(line) for line in (tmp_path / "tasks/cloze.jsonl").read_text().splitlines()]
    assert {(len(row["context"].split()), row["answer"]) for row in asked} == {(45, " again")}
    (scored,) = Tasks(["cloze"], limit=1, folder=tmp_path / "tasks").run(model, tokenizer)
    assert set(scored.scores) == {"acc"}
    Tasks(["continuation"], folder=tmp_path / "tasks")  # whose answers are too long for this model


def test_equal_runs_give_equal_results_and_a_limit_limits(folder, model, tokenizer):
    tasks = Tasks(["foxes", "dogs"], limit=2, folder=folder)
    first = tasks.run(model, tokenizer)
    assert tasks.run(model, tokenizer) == first
    assert measure_model(model, tokenizer, tasks=tasks).tasks == first
    assert [result.samples for result in first] == [2, 2]


def test_a_processor_reads_tasks_by_its_tokenizer(folder, model, tokenizer):
    tasks = Tasks(["foxes"], folder=folder)
    assert tasks.run(model, image_and_text_processor()) == tasks.run(model, tokenizer)


def test_groups_and_wildcards(tmp_path, model, tokenizer):
    write_tasks(tmp_path / "tasks")
    write_task(tmp_path / "tasks", "foxes_few", CHOICE, QUESTIONS, num_fewshot=1, fewshot_split="test")
    (tmp_path / "tasks" / "all.yaml").write_text(
        json.dumps(
            {
                "group": "all",
                "task": ["foxes", "foxes_few"],
                "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
            }
        )
    )
    results = {each.name: each for each in Tasks(["all"], folder=tmp_path / "tasks").run(model, tokenizer)}
    assert set(results) == {"all", "foxes", "foxes_few"}
    mean = (results["foxes"].scores["acc"].value + results["foxes_few"].scores["acc"].value) / 2
    assert results["all"].scores["acc"].value == pytest.approx(mean)
    assert results["foxes_few"].shots == 1
    assert {name: each.group for name, each in results.items()} == {"all": None, "foxes": "all", "foxes_few": "all"}
    for name, members in {"plain": ["foxes", "foxes_few"], "outer": ["plain", "all"]}.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(json.dumps({"group": name, "task": members}))
        found = {each.name: each.scores for each in Tasks([name], folder=tmp_path / "tasks").run(model, tokenizer)}
        assert {"foxes", "foxes_few"} <= set(found) <= set(results), "groups without a score of their own are left out"
        assert found == {each: results[each].scores for each in found}
    found = Tasks(["foxes*"], folder=tmp_path / "tasks").run(model, tokenizer)
    assert {each.name: each.scores for each in found} == {n: r.scores for n, r in results.items() if n != "all"}
    assert not any(each.group for each in found)


METRICS = """
def results(doc, results):
    return dict.fromkeys(("half", "nan", "infinite", "parts", "words"), 1.0)

def half(values): return 0.5
def nan(values): return float("nan")  # as lm-eval's own nanmean where all answers are empty
def infinite(values): return float("inf")
def parts(values): return {"first": 1.0}
def words(values): return "n/a"
"""


def test_what_is_no_finite_number_is_no_score(tmp_path, model, tokenizer):
    metrics = ("half", "nan", "infinite", "parts", "words")
    write_task(tmp_path / "t", "odd", CHOICE, QUESTIONS, process_results="F results", metric_list=[
        {"metric": name, "aggregation": f"F {name}", "higher_is_better": True} for name in metrics
    ])  # fmt: skip
    file = tmp_path / "t" / "odd.yaml"
    file.write_text(re.sub('"F ([a-z]+)"', r"!function metrics.\1", file.read_text()))
    (tmp_path / "t" / "metrics.py").write_text(METRICS)
    found = measure_model(model, tokenizer, tasks=Tasks(["odd"], folder=tmp_path / "t"))
    scores = {name: score.value for name, score in found.tasks[0].scores.items()}
    assert scores == dict.fromkeys(metrics) | {"half": 0.5}
    assert str(found) == "odd half 0.5"


# -- manners -------------------------------------------------------------------------------------------------------


def test_requests_that_do_not_fit_are_counted(tmp_path, model, tokenizer):
    long = [{"context": "the quick brown fox " * 12, "choices": [" jumps", " sleeps"], "answer": 0}]
    write_task(tmp_path / "t", "long", CHOICE, long * 2)
    events = []
    Tasks(["long"], folder=tmp_path / "t").run(model, tokenizer, progress=EventProgress(events.append))
    assert [event.text for event in events if event.text] == [
        "4 requests of tasks lost their beginning: longer than the model can take"
    ]
    write_task(tmp_path / "t", "longer", CHOICE, [{**long[0], "context": "the", "choices": [long[0]["context"], "x"]}])
    with pytest.raises(TaskError, match=r"an answer of a task has .* tokens, but the model can take 32"):
        Tasks(["longer"], folder=tmp_path / "t").run(model, tokenizer)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_an_unknown_task_is_named_with_those_like_it(folder, monkeypatch):
    manager = library.TaskManager
    # Indexing lm-eval's own tasks takes many seconds; the folder's are enough to see what is said.
    monkeypatch.setattr(library, "TaskManager", lambda include_path, **_: manager(None, include_path, False))
    with pytest.raises(TaskError, match=r"task 'fox' is unknown to .* and lm-eval .* did you mean foxes\?"):
        Tasks(["foxes", "fox"], folder=folder)


def test_missing_data_and_broken_tasks_are_one_line(tmp_path, model, tokenizer):
    write_task(tmp_path / "t", "lost", CHOICE, QUESTIONS)
    (tmp_path / "t" / "lost.jsonl").unlink()
    with pytest.raises(TaskError, match=r"tasks lost cannot be loaded \(check the files in the folder\): .*lost"):
        Tasks(["lost"], folder=tmp_path / "t")
    write_task(tmp_path / "t", "broken", CHOICE, QUESTIONS, doc_to_target="{{answer.missing.more}}")
    with pytest.raises(TaskError, match="tasks broken cannot be") as caught:
        Tasks(["broken"], folder=tmp_path / "t").run(model, tokenizer)
    assert "\n" not in str(caught.value)
