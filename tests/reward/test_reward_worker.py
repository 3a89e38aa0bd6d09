"""The reward worker: which function scores a row, where the score goes, and what happens when one fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_rows import TOKENIZER, T, batch, custom, job
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForSequenceClassification

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig, ModelNotFound, RewardFailed
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.reward.scoring_call import RowScore
from rolemesh.services.reward.worker import RewardWorker

# --------------------------------------------------------------------------------------- rules


async def test_a_score_lies_on_the_last_response_token(tiny_model: Path) -> None:
    rows = batch(("openai/gsm8k", "#### 72", "72"), ("math", r"\boxed{3}", "3"), ("math", r"\boxed{4}", "3"))
    scores = await RewardWorker(job(tiny_model)).compute_scores(rows)
    expected = torch.zeros(3, T)
    expected[0, len("#### 72")] = 1.0  # the end token's place
    expected[1, len(r"\boxed{3}")] = 1.0
    assert scores["token_level_scores"].dtype == scores["acc"].dtype == torch.float32
    assert torch.equal(scores["token_level_scores"], expected)
    assert scores["acc"].tolist() == [1.0, 1.0, 0.0]
    assert sorted(scores.columns) == ["acc", "token_level_scores"]


async def test_format_score_reaches_the_rule(tiny_model: Path) -> None:
    rows = batch(("openai/gsm8k", "#### 73", "72"))
    scores = await RewardWorker(job(tiny_model, format_score=0.25)).compute_scores(rows)
    assert scores["token_level_scores"].sum() == 0.25
    assert scores["acc"].tolist() == [0.0]


async def test_special_tokens_are_not_part_of_the_text(tiny_model: Path, tmp_path: Path) -> None:
    source = "def compute_score(solution_str, **row):\n    return float(solution_str == 'hi')\n"
    rows = batch(("any", "hi", None))
    scores = await RewardWorker(job(tiny_model, **custom(tmp_path, source))).compute_scores(rows)
    assert scores["acc"].tolist() == [1.0]


async def test_an_unknown_data_source_fails_with_the_rows_uid(tiny_model: Path) -> None:
    rows = batch(("openai/gsm8k", "#### 1", "1"), ("my/set", "1", "1"))
    with pytest.raises(RewardFailed, match=r"row train-000001.*'my/set'.*custom_reward_function"):
        await RewardWorker(job(tiny_model)).compute_scores(rows)


async def test_a_response_without_a_token_is_an_error(tiny_model: Path) -> None:
    rows = batch(("math", "", "1"))
    rows["response_mask"] = torch.zeros(1, T, dtype=torch.bool)
    with pytest.raises(InvalidBatch, match="train-000000 has no token"):
        await RewardWorker(job(tiny_model)).compute_scores(rows)


def conversations(*rows: tuple[str, Any, list[tuple[int, str]]]) -> DataProto:
    """Make rows from (data_source, ground_truth, [(number in the column turns, text)])."""
    whole = batch(*((source, "".join(text for _, text in said), truth) for source, truth, said in rows))
    whole["turns"] = torch.zeros_like(whole["responses"])
    for row, (_, _, said) in enumerate(rows):
        numbers = torch.tensor([number for number, text in said for _ in text])
        whole["turns"][row, : len(numbers)] = numbers
    whole["response_mask"] = whole["turns"] > 0
    whole["environment_rewards"] = torch.zeros(whole["turns"].shape)
    return whole


async def test_a_rule_reads_what_the_policy_wrote_alone_turn_by_turn(tiny_model: Path) -> None:
    rows = conversations(
        ("math_dapo", "17", [(1, "find"), (-2, "Answer: 17\n"), (2, "unknown")]),
        ("lighteval/MATH", "3", [(-1, r"\boxed{3}"), (1, "unknown")]),
        ("math_dapo", "5", [(1, "Answer: 5"), (-2, "\nAnswer: 6\n"), (2, "So")]),
        ("openai/gsm8k", "18", [(1, "#### 1"), (-2, "."), (2, "8 apples")]),
        ("openai/gsm8k", "1", [(1, "#### 1"), (-2, "."), (2, "8 apples")]),
        ("openai/gsm8k", "2", [(1, "#### 1"), (-2, "."), (2, "#### 2")]),
    )
    own = await RewardWorker(job(tiny_model)).compute_scores(rows)
    assert own["acc"].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    as_verl = await RewardWorker(job(tiny_model, rules="verl")).compute_scores(rows[:3])
    assert as_verl["acc"].tolist() == [1.0, 1.0, 0.0]


async def test_a_function_gets_the_whole_conversation(tiny_model: Path, tmp_path: Path) -> None:
    source = "def compute_score(solution_str, **row):\n    return float(solution_str == 'asks.told.says')\n"
    rows = conversations(("any", None, [(1, "asks."), (-2, "told."), (2, "says")]))
    worker = RewardWorker(job(tiny_model, **custom(tmp_path, source)))
    assert (await worker.compute_scores(rows))["acc"].tolist() == [1.0]
    worker.close()


# -------------------------------------------------------------------------------------- custom


async def test_a_custom_function_sees_the_row_and_may_return_acc(tiny_model: Path, tmp_path: Path) -> None:
    """It may differ from the score."""
    source = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert data_source == 'mine' and extra_info['index'] == 0 and ground_truth == {'target': ['a']}\n"
        "    return {'score': -2.5, 'acc': True}\n"
    )
    rows = batch(("mine", "text", {"target": ["a"]}))
    scores = await RewardWorker(job(tiny_model, **custom(tmp_path, source))).compute_scores(rows)
    assert scores["token_level_scores"].sum() == -2.5
    assert scores["acc"].tolist() == [1.0]


async def test_a_raising_function_fails_the_call_with_uid_and_line(tiny_model: Path, tmp_path: Path) -> None:
    """The error names the function, too."""
    source = "def compute_score(solution_str, **row):\n    return 1 / (len(solution_str) - 3)\n"
    worker = RewardWorker(job(tiny_model, **custom(tmp_path, source)))
    with pytest.raises(
        RewardFailed, match=r"row train-000001: compute_score of .*mine.py raised Zero.*mine.py, line 2\)"
    ):
        await worker.compute_scores(batch(("a", "x", None), ("a", "xyz", None)))


NO_SCORES = (
    *(
        "float('nan')",
        "float('inf')",
        "None",
        "'1'",
        "{}",
        "{'acc': 1}",
        "[1.0]",
        "1e300",
        "10**400",
        "10**5000",
    ),
    *("{'score': 1, 'acc': 1e39}", "{'score': 1, 'brief': float('nan')}", "Shy()", "{Shy(): 1, 'score': 1}"),
)


@pytest.mark.parametrize("result", NO_SCORES)
async def test_a_score_that_is_not_a_finite_number_is_refused(
    tiny_model: Path, tmp_path: Path, result: str
) -> None:
    source = (
        "class Shy:\n    def __repr__(self): raise KeyError('shy')\n"
        f"def compute_score(**row):\n    return {result}\n"
    )
    worker = RewardWorker(job(tiny_model, **custom(tmp_path, source)))
    with pytest.raises(RewardFailed, match=r"row train-000000: compute_score of .* returned") as raised:
        await worker.compute_scores(batch(("a", "x", None)))
    assert ("Shy" in result) == ("whose repr raises KeyError" in str(raised.value))
    worker.close()


@pytest.mark.parametrize(
    ("raises", "said"), [("Shy()", "Shy: a Shy whose str raises KeyError"), ("ValueError('z' * 10**6)", "zzz")]
)
async def test_an_error_whose_text_raises_or_is_huge_is_reported_too(
    tiny_model: Path, tmp_path: Path, raises: str, said: str
) -> None:
    source = (
        "class Shy(Exception):\n    def __str__(self): raise KeyError('shy')\n"
        f"def compute_score(**row):\n    raise {raises}\n"
    )
    worker = RewardWorker(job(tiny_model, **custom(tmp_path, source)))
    with pytest.raises(RewardFailed, match=rf"row train-000000: .*{said}.*mine.py, line 4\)") as raised:
        await worker.compute_scores(batch(("a", "x", None)))
    assert len(str(raised.value)) < 2000
    worker.close()


def test_numbers_of_every_kind_are_scores() -> None:
    for value in (1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1)):
        assert RowScore.of(value) == RowScore(1.0, 1.0, {"score": 1.0})
    assert RowScore.of({"score": 0.5}) == RowScore(0.5, 0.5, {"score": 0.5})
    said = {"score": np.array(0.5), "acc": np.bool_(True), "format": 0.25, "note": "x"}
    assert RowScore.of(said) == RowScore(0.5, 1.0, {"score": 0.5, "acc": 1.0, "format": 0.25})


def test_a_custom_file_that_is_not_there_is_an_error_at_start(tiny_model: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such file"):
        RewardWorker(job(tiny_model, custom_reward_function={"path": "/no/such/file.py"}))


# ------------------------------------------------------------------------------- a reward model


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classification model with the policy's tokenizer."""
    return make_reward_model(tmp_path_factory.mktemp("rm"), TOKENIZER)


def make_reward_model(path: Path, tokenizer: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Qwen2ForSequenceClassification(
            Qwen2Config(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, num_labels=1,
                pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            )
        )  # fmt: skip
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def with_model(path: Path, **keys: Any) -> dict[str, Any]:
    return {"reward_model": {"enable": True, "model": {"path": str(path)}, **keys}}


def texts(num_rows: int) -> list[tuple[str, str, Any]]:
    return [("chat", "answer " + "!" * i, None) for i in range(num_rows)]


async def test_rows_of_style_model_are_scored_by_model_others_by_rule(
    tiny_model: Path, reward_model: Path
) -> None:
    rows = DataProto.concat([batch(("math", r"\boxed{3}", "3")), batch(*texts(1), style="model")])
    scores = await RewardWorker(job(tiny_model, **with_model(reward_model))).compute_scores(rows)
    model = Qwen2ForSequenceClassification.from_pretrained(reward_model)
    ids = torch.cat(
        [rows["prompts"][1][rows["prompt_mask"][1]], rows["responses"][1][rows["response_mask"][1]]]
    )
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0, 0]
    torch.testing.assert_close(scores["acc"], torch.stack([torch.tensor(1.0), expected]), atol=1e-5, rtol=1e-5)
    assert scores["token_level_scores"][1, len("answer ")] == scores["acc"][1]


async def test_a_rows_score_has_the_same_bits_whoever_shares_the_call(
    tiny_model: Path, reward_model: Path
) -> None:
    worker = RewardWorker(job(tiny_model, **with_model(reward_model, micro_batch_size_per_gpu=4)))
    rows = batch(*texts(7), style="model")
    together = (await worker.compute_scores(rows))["acc"]
    assert len(set(together.tolist())) == 7
    for index in ([0], [6], [3, 1], [6, 5, 4, 3, 2, 1, 0]):
        assert torch.equal((await worker.compute_scores(rows.select_idxs(index)))["acc"], together[index])


@pytest.mark.parametrize("added", [[], ["answer"]], ids=["the same ids", "another tokenizer"])
async def test_the_model_scores_the_policys_last_prompt_and_response(
    tiny_model: Path, tmp_path: Path, added: list[str]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(added)
    worker = RewardWorker(job(tiny_model, **with_model(make_reward_model(tmp_path / "rm", tokenizer))))
    rows = batch(*texts(2), style="model")
    written = rows["response_mask"].long()
    turns, contexts = written.clone(), 0 * written
    turns[1, 3:5], turns[1, 5:] = -2, 2 * written[1, 5:]  # another prompt of two tokens, and what is said to it
    contexts[1, 3:] = written[1, 3:]
    talks = {"turns": turns, "contexts": contexts, "environment_rewards": torch.zeros(2, T)}
    whole = DataProto({**rows.tensors, **talks, "response_mask": turns > 0}, rows.non_tensors)
    alone = DataProto(dict(rows.tensors), rows.non_tensors)
    alone["prompt_mask"] = rows["prompt_mask"] & torch.tensor([[True], [False]])
    alone["response_mask"] = rows["response_mask"] & ((torch.arange(T) >= 3) | torch.tensor([[True], [False]]))
    scores = (await worker.compute_scores(whole))["acc"]
    assert torch.equal(scores, (await worker.compute_scores(alone))["acc"])
    assert scores[1] != (await worker.compute_scores(rows))["acc"][1]
    whole["contexts"][1, 6] = 0
    with pytest.raises(InvalidBatch, match="'contexts', row 1, goes down at 6"):
        await worker.compute_scores(whole)


async def test_a_model_with_another_tokenizer_reads_the_text(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["answer"])
    path = make_reward_model(tmp_path / "rm", tokenizer)
    worker = RewardWorker(job(tiny_model, **with_model(path)))
    assert "without a chat format" in caplog.text
    rows = batch(*texts(3), style="model")
    together = (await worker.compute_scores(rows))["acc"]
    model = Qwen2ForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        ids = tokenizer("ask 2answer !!", return_tensors="pt")["input_ids"]
        torch.testing.assert_close(together[2], model(input_ids=ids).logits[0, 0], atol=1e-5, rtol=1e-5)
    assert torch.equal((await worker.compute_scores(rows[2:]))["acc"], together[2:])


async def test_a_reward_model_never_gets_an_id_outside_its_vocabulary(
    tiny_model: Path, reward_model: Path, tmp_path: Path
) -> None:
    """A policy's table of tokens is often larger than its tokenizer, and it may answer with any id of it."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    policy.resize_token_embeddings(300)
    policy.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    worker = RewardWorker(job(tmp_path, **with_model(reward_model)))
    rows = batch(*texts(2), style="model")
    rows["responses"][1, 0] = 299
    assert len(worker.validator.check_request("ComputeScores", rows)) == 2
    assert (await worker.compute_scores(rows))["acc"].isfinite().all()
    rows["responses"][1, 0] = 300
    with pytest.raises(InvalidBatch, match=r"'responses', row 1, position 0, is 300; .* the vocabulary of 300"):
        worker.validator.check_request("ComputeScores", rows)


async def test_a_row_of_style_model_without_a_model_fails(tiny_model: Path) -> None:
    with pytest.raises(RewardFailed, match=r"train-000000.*reward.reward_model.enable is false"):
        await RewardWorker(job(tiny_model)).compute_scores(batch(*texts(1), style="model"))


def test_a_model_that_is_not_there_is_an_error_at_start(tiny_model: Path) -> None:
    with pytest.raises(ModelNotFound):
        RewardWorker(job(tiny_model, **with_model(Path("/no/such/model"))))
