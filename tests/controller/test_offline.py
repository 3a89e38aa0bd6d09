"""Generation and evaluation alone: what they keep, what they refuse, and what their numbers are."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from full_disk import files_of_at_most
from in_process import small_job, workers, write_data
from transformers import AutoModelForSequenceClassification

from rolemesh.catalog.datasets import DATASETS, DatasetSpec
from rolemesh.data import PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, InvalidData, RolemeshError
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.offline.evaluation import Evaluation, evaluate
from rolemesh.services.controller.offline.generation import generate
from rolemesh.services.controller.offline.generation_input import (
    check_output,
    check_role,
    read_input_rows,
    settings_of,
)
from rolemesh.services.controller.offline.parts import Parts
from rolemesh.services.controller.offline.responses import ResponseRows
from rolemesh.services.controller.run.run_dir import held
from rolemesh.services.controller.stages.validation import standard_errors, validate
from rolemesh.services.processes.generate import generate_file

ROW = {
    "data_source": "digits",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def file_of(path: Path, *rows: dict[str, Any]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


async def generated(directory: Path, model: Path, prompts: Path, output: Path, *overrides: str) -> None:
    """Do what `rolemesh generate` does, with the rollout in this process."""
    job = small_job(directory, model, "run", f"data.val_files={prompts}", *overrides)
    tokenizer = load_tokenizer(job.actor.model)
    data = PromptDataset(job.data.val_files, job.data, tokenizer, split="val", scored=False)
    given = read_input_rows(job, data, log_probs=False)
    parts = Parts(output, settings_of(job, data), len(data), job.data.val_batch_size or 64, log_probs=False)
    parts.folder.mkdir(exist_ok=True)
    parts.begin()
    with workers(job) as roles:
        await generate(data, roles.rollout, job, parts, tokenizer, lambda _: None)
    parts.finish(given)


async def evaluated(directory: Path, model: Path, file: Path, *overrides: str) -> Evaluation:
    job = small_job(directory, model, "run", f"data.val_files={file}", *overrides)
    rows = ResponseRows(job, load_tokenizer(job.actor.model), "responses")
    with workers(job) as roles:
        return await evaluate(rows, roles.reward, lambda _: None)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
async def test_all_columns_of_the_rows_are_kept(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """Only the prompt is needed. Parquet's own types stay, of which JSON has no dates."""
    day: dict[str, Any] = {"day": date(2024, 5, 6)} if kind == "parquet" else {}
    rows = [{"prompt": ROW["prompt"], "number": i, "note": None if i else "first", **day} for i in range(3)]
    output = tmp_path / "out.parquet"
    await generated(tmp_path, tiny_model, file_of(tmp_path / f"in.{kind}", *rows), output)
    found = pq.read_table(output).to_pylist()
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    assert all(len(row["responses"]) == 1 and isinstance(row["responses"][0], str) for row in found)


async def test_rows_that_a_validation_leaves_out_are_left_out(tiny_model: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "1" * 60}]
    prompts = file_of(tmp_path / "in.parquet", ROW, {**ROW, "prompt": long}, {**ROW, "data_source": "last"})
    output = tmp_path / "out.parquet"
    await generated(tmp_path, tiny_model, prompts, output, "data.filter_overlong_prompts=true")
    assert [row["data_source"] for row in pq.read_table(output).to_pylist()] == ["digits", "last"]
    with pytest.raises(InvalidData, match=r"row 1: column 'prompt' is \d+ tokens"):
        await generated(tmp_path, tiny_model, prompts, output)


def test_a_disk_that_fills_loses_no_part(tmp_path: Path) -> None:
    """Neither while a part is written, nor the output; with room, the same parts are gone on with."""
    parts = Parts(tmp_path / "out.parquet", {"key": 1}, 3, 1, log_probs=False)
    parts.folder.mkdir()
    parts.begin()
    tables = [pa.table({"responses": [[f"{number}"]]}) for number in range(3)]
    given = pa.table({"prompt": ["a", "b", "c"]})
    parts.write(0, tables[0])
    parts.write(2, tables[2])
    full = r"part-000001\.parquet cannot be written: .*File too large\. 2 of 3 prompts are kept in"
    with files_of_at_most(100), pytest.raises(RolemeshError, match=full):
        parts.write(1, tables[1])
    assert parts.missing() == [1]
    parts.write(1, tables[1])
    with files_of_at_most(100), pytest.raises(RolemeshError, match="3 of 3 prompts are kept in"):
        parts.finish(given)
    assert parts.missing() == []
    assert not parts.output.exists()
    parts.finish(given)
    expected = {**given.to_pydict(), "responses": [["0"], ["1"], ["2"]]}
    assert pq.read_table(parts.output).to_pydict() == expected
    assert not parts.folder.exists()


def test_parts_of_other_settings_are_refused_by_their_keys(tmp_path: Path) -> None:
    def parts(settings: dict[str, Any], size: int = 2) -> Parts:
        return Parts(tmp_path / "out.parquet", settings, 4, size, log_probs=False)

    first = parts({"a": 1, "b": 2})
    first.folder.mkdir()
    first.begin()
    parts({"b": 2, "a": 1}).begin()
    with pytest.raises(InvalidConfig, match="b was 2 and is 3, c was unset and is 'x'; restore these"):
        parts({"a": 1, "b": 3, "c": "x"}).begin()
    with pytest.raises(InvalidConfig, match=r"prompts of a part\) was 2 and is 3"):
        parts({"a": 1, "b": 2}, 3).begin()


async def test_settings_differ_by_prompts_and_keys_not_by_replicas(tiny_model: Path, tmp_path: Path) -> None:
    """The keys that change the answers: those of sampling and of how the weights are applied."""

    def settings(*overrides: str) -> dict[str, Any]:
        job = small_job(tmp_path, tiny_model, "run", *overrides)
        data = PromptDataset(
            job.data.val_files, job.data, load_tokenizer(job.actor.model), split="val", scored=False
        )
        return settings_of(job, data)

    one = settings(sampled := "rollout.val_kwargs.do_sample=true")
    assert settings(sampled, "placement.replicas.rollout=3", "trainer.total_training_steps=9") == one
    other = settings(sampled, "rollout.val_kwargs.top_k=5", "rollout.seed=3")
    assert {key for key in one if other[key] != one[key]} == {"rollout.val_kwargs.top_k", "rollout.seed"}
    computed = settings(sampled, "actor.head_dtype=float32", "trainer.deterministic=true")
    assert {key for key in one if computed[key] != one[key]} == {"actor.head_dtype", "trainer.deterministic"}
    shorter = settings(sampled, "data.val_max_samples=2")
    assert shorter["the prompts' tokens"] != one["the prompts' tokens"]


async def test_text_of_other_origin_is_scored_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    """Also where no tokens decode to it, or more than a response may have. The reward is digits / 8."""
    special = load_tokenizer(small_job(tmp_path, tiny_model, "run").actor.model).eos_token
    texts = [f"12{special}3", "4" * 100, "", "é\U0001f600 7"]
    seen = tmp_path / "seen.txt"
    rows = [{**ROW, "responses": texts}]
    del rows[0]["prompt"]
    job_file = file_of(tmp_path / "in.jsonl", *rows)
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    open({str(seen)!r}, 'a', encoding='utf-8').write(solution_str + chr(0))\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    own = f"reward.custom_reward_function.path={tmp_path / 'own.py'}"
    found = await evaluated(tmp_path, tiny_model, job_file, own, "reward.num_workers=1")
    assert seen.read_text(encoding="utf-8").split("\0")[:-1] == texts
    assert found.n == 4
    assert found.metrics["val-core/digits/acc/mean@4"] == (3 + 100 + 0 + 1) / 8 / 4


async def test_generate_and_evaluate_report_the_rows_they_leave_out(tiny_model: Path, tmp_path: Path) -> None:
    """Three of five rows are chosen, and the prompt of one of these is too long to be generated from."""
    long = {**ROW, "prompt": [{"role": "user", "content": "1" * 60}]}
    file = file_of(tmp_path / "in.parquet", *({**row, "responses": ["2"]} for row in (long, *[ROW] * 4)))
    keys = (f"data.val_files={file}", "data.shuffle=false", "data.filter_overlong_prompts=true")
    for limit, generated_from, evaluated in (
        (3, "left out of 5 rows: 2 by data.val_max_samples, 1 by data.filter_overlong_prompts", "2 by"),
        (-1, "left out of 5 rows: 1 by data.filter_overlong_prompts", ""),
    ):
        job = small_job(tmp_path, tiny_model, "run", *keys, f"data.val_max_samples={limit}")
        tokenizer = load_tokenizer(job.actor.model)
        prompts = PromptDataset(job.data.val_files, job.data, tokenizer, split="val", scored=False)
        assert prompts.left_out == generated_from
        expected = f"left out of 5 rows: {evaluated} data.val_max_samples" if evaluated else ""
        assert ResponseRows(job, tokenizer, "responses").left_out == expected


OVERLONG = (
    "reward.reward_manager=dapo",
    "reward.overlong_buffer.enable=true",
    "reward.overlong_buffer.len=4",
    "reward.overlong_buffer.penalty_factor=1.0",
)
SAMPLED = ("rollout.val_kwargs.n=2", "rollout.val_kwargs.do_sample=true")


async def test_the_overlong_penalty_counts_sampled_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """Without ids, those of the text and one more, by which it ends. The penalty grows from 4 tokens to 8."""
    tokenizer = load_tokenizer(small_job(tmp_path, tiny_model, "run").actor.model)
    ids = tokenizer("abcde", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    rows = [{**ROW, "responses": ["abcde"]}, {**ROW, "responses": ["abcde"]}]
    outcome = await evaluated(tmp_path, tiny_model, file_of(tmp_path / "text.parquet", *rows), *OVERLONG)
    assert outcome.metrics["val-aux/digits/reward/mean@1"] == -0.5
    for row in rows:
        row["response_ids"] = [ids]
    outcome = await evaluated(tmp_path, tiny_model, file_of(tmp_path / "ids.parquet", *rows), *OVERLONG)
    assert outcome.metrics["val-aux/digits/reward/mean@1"] == -0.25
    rows[1]["responses"] = ["other"]
    with pytest.raises(InvalidData, match="row 1: the tokens in column 'response_ids' are not those"):
        await evaluated(tmp_path, tiny_model, file_of(tmp_path / "stale.parquet", *rows), *OVERLONG)
    rows[1] |= {"responses": ["abcde"], "response_ids": [[300]]}
    with pytest.raises(InvalidData, match=r"row 1: column 'response_ids' should hold 1 lists .* \[\[300\]\]"):
        await evaluated(tmp_path, tiny_model, file_of(tmp_path / "beyond.parquet", *rows), *OVERLONG)


@pytest.mark.parametrize(
    ("judge", "sampling"),
    [("model", SAMPLED), ("length", SAMPLED), ("length", ())],
    ids=["model", "length", "greedy"],
)
async def test_evaluate_scores_the_token_ids_of_a_validation(
    judge: str, sampling: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    """To the bit: a reward model, and the penalty of long responses. A tiny model seldom writes valid UTF-8, so
    its texts would have other tokens."""
    prompts, keys = Path(write_data(tmp_path, "in", 5)), OVERLONG
    if judge == "model":
        with torch.random.fork_rng():
            torch.manual_seed(5)
            scorer = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
        scorer.save_pretrained(tmp_path / "scorer")
        load_tokenizer(small_job(tmp_path, tiny_model, "run").actor.model).save_pretrained(tmp_path / "scorer")
        rows = pq.read_table(prompts).to_pylist()
        prompts = file_of(
            tmp_path / "by_model.parquet", *({**row, "reward_model": {"style": "model"}} for row in rows)
        )
        keys = ("reward.reward_model.enable=true", f"reward.reward_model.model.path={tmp_path / 'scorer'}")
    keys = (*keys, *sampling)
    job = small_job(tmp_path, tiny_model, "run", f"data.val_files={prompts}", *keys)
    data = PromptDataset(job.data.val_files, job.data, load_tokenizer(job.actor.model), split="val")
    with workers(job) as roles:
        _, expected = await validate(data.batches(2), roles, job)
    output = tmp_path / "out.parquet"
    await generated(tmp_path, tiny_model, prompts, output, *keys, "data.val_batch_size=3")
    found = await evaluated(tmp_path, tiny_model, output, *keys)
    assert found.metrics == expected
    assert any(value for value in expected.values())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW], r"has no column \['responses'\]; it has"),
        ([{**ROW, "responses": "2"}], "row 0: column 'responses' should hold a list of texts.*it holds '2'"),
        ([{**ROW, "responses": ["2", None]}], r"row 0: .*it holds \['2', None\]"),
        ([{**ROW, "responses": [1]}], r"row 0: .*it holds \[1\]"),
        (
            [{**ROW, "responses": ["1", "2"]}, {**ROW, "responses": ["1"]}],
            "row 1: column 'responses' has 1 responses, but .*row 0 has 2",
        ),
        ([{**ROW, "responses": ["2"], "data_source": None}], "row 0: column 'data_source' should hold a str"),
        ([{"responses": ["2"]}], r"has no column \['data_source', 'reward_model'\]"),
    ],
)
def test_responses_that_cannot_be_scored_are_named(
    rows: list[dict[str, Any]], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = file_of(tmp_path / "in.jsonl", *rows)
    job = small_job(tmp_path, tiny_model, "run", f"data.val_files={file}")
    with pytest.raises(InvalidData, match=f"in.jsonl.*{message}"):
        ResponseRows(job, load_tokenizer(job.actor.model), "responses")


async def test_prompts_that_cannot_be_answered_are_named(tiny_model: Path, tmp_path: Path) -> None:
    async def refused(match: str, *rows: dict[str, Any]) -> None:
        file = file_of(tmp_path / "in.jsonl", *rows)
        with pytest.raises(InvalidData, match=f"in.jsonl.*{match}"):
            await generated(tmp_path, tiny_model, file, tmp_path / "out.parquet")

    await refused("has no rows")
    await refused(r"row 0 has no column \['prompt'\]; it has \['text'\]", {"text": "1+1="})
    await refused("has a column 'responses' already, which generate would add", {**ROW, "responses": ["2"]})
    mixed = [{**ROW, "level": 1}, {**ROW, "level": "high"}]
    await refused("column 'level' has values of several types", *mixed)
    await refused("has a column that Parquet cannot hold: .*struct.*; drop it", {**ROW, "extra_info": {}})
    assert not (tmp_path / "out.parquet.parts").exists()


def test_commands_that_cannot_be_done_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"there is no folder .*absent; make it"):
        check_output(tmp_path / "absent" / "out.parquet", ".parquet")
    with pytest.raises(
        InvalidConfig, match=r"--output is .*out.csv; a file with the suffix \.parquet expected"
    ):
        check_output(tmp_path / "out.csv", ".parquet")
    talking = small_job(tmp_path, tiny_model, "run", "rollout.multi_turn.enable=true")
    with pytest.raises(InvalidConfig, match=r"generate has rows of one turn, but rollout\.multi_turn\.enable"):
        check_role(talking, "rollout", "generate")
    greedy = small_job(tmp_path, tiny_model, "run", "trainer.val_before_train=false", "rollout.val_kwargs.n=2")
    with pytest.raises(
        InvalidConfig, match=r"rollout\.val_kwargs\.n is 2, .*so all answers to a prompt are the same"
    ):
        generate_file(greedy, tmp_path / "out.parquet", log_probs=False)
    sampling = ["rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=0.005"]
    raised = small_job(
        tmp_path, tiny_model, "run", "trainer.val_before_train=false", "rollout.name=vllm", *sampling
    )
    with pytest.raises(InvalidConfig, match=r"rollout\.val_kwargs\.temperature is 0\.005, but engine vllm"):
        generate_file(raised, tmp_path / "out.parquet", log_probs=False)


def test_two_commands_do_not_fill_one_output(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    busy = r"out\.parquet\.parts is being filled by another command; wait for its end"
    with held(tmp_path / "out.parquet.parts"), pytest.raises(RolemeshError, match=busy):
        generate_file(job, tmp_path / "out.parquet", log_probs=False)


async def test_rows_of_ones_own_data_set_are_kept_whole(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": ROW["prompt"], "level": level} for level in range(3)]
    with pytest.MonkeyPatch.context() as patched:
        own = DatasetSpec(name="own", code=lambda files, config, split: rows, origin="tests")
        patched.setitem(DATASETS._declared, "own", own)
        await generated(tmp_path, tiny_model, tmp_path, tmp_path / "out.parquet", "data.dataset=own")
    assert pq.read_table(tmp_path / "out.parquet")["level"].to_pylist() == [0, 1, 2]


def test_standard_errors_by_hand() -> None:
    """Of prompts with means 1, 0 and 1/2 the deviation is 1/2, so the error is 1/2/√3. Of one prompt, none."""
    acc = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    batch = DataProto.from_dict(
        {"acc": acc, "token_level_scores": acc[:, None]}, {"data_source": ["x"] * 6 + ["y"] * 2}
    )
    found = standard_errors(batch, 2)
    assert found["val-core/x/acc/mean@2"] == pytest.approx(0.5 / 3**0.5)
    # pass@2 of the three is 1, 0, 1: deviation √(1/3)
    assert found["val-core/x/acc/pass@2"] == pytest.approx(1 / 3)
    written = json.loads(Evaluation(2, {"x": 3, "y": 1}, {}, found).to_json())
    assert written["standard_errors"]["val-core/y/acc/mean@2"] is None
