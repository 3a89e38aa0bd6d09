"""`rolemesh generate` and `rolemesh evaluate` as a person uses them: together they are a run's validation."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import recorded, small_job, train, write_data
from in_process_commands import rolemesh as command
from launched import rolemesh, written

# Any text has a score, which differs from text to text; and a first character, as a vote.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    score = (sum(map(ord, solution_str)) + extra_info["index"]) % 17 / 16
    return {"score": score, "acc": float(score > 0.5), "pred": solution_str[:1]}
"""
SOURCES = ("digits", "numbers")
TRAINED = ("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=2", "actor.optim.lr=0.1")
SAMPLED = ("rollout.val_kwargs.n=4", "rollout.val_kwargs.do_sample=true")


async def said_here(code: int, *arguments: str) -> str:
    """Run a command that starts no role, in this process."""
    answer = await asyncio.to_thread(command, *arguments, width=1000)
    assert answer.returncode == code, answer
    return answer.stderr


async def said(code: int, *arguments: str) -> str:
    async with rolemesh(*arguments) as launched:
        ended, output = await launched.end()
    assert ended == code, output
    return output


async def test_generate_then_evaluate_is_the_validation_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    """To the bit, of trained weights. With two replicas the rows are those of one, however prompts are cut."""
    prompts = write_data(tmp_path, "held_out", 11)
    overrides = (*SAMPLED, f"data.val_files={prompts}", *TRAINED)
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    (tmp_path / "reward.py").write_text(REWARD)
    await train(job)
    record = recorded(job)[-1]
    expected = {name: value for name, value in record.items() if name.startswith("val-")}
    assert all(0 < expected[f"val-aux/{source}/reward/mean@4"] < 1 for source in SOURCES)
    weights = f"actor.model.path={job.run_dir / 'global_step_2' / 'actor'}"
    file = written(small_job(tmp_path, tiny_model, "run", *overrides, weights), tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)

    keys = [("data.val_batch_size=4",), ("placement.replicas.rollout=2", "rollout.max_num_seqs=4")]
    outputs = [tmp_path / f"{number}.parquet" for number in range(2)]
    for output, own in zip(outputs, keys, strict=True):
        await said(0, "generate", file, "--output", str(output), "--log-probs", *own)
    rows, others = (pq.read_table(output).to_pylist() for output in outputs)
    assert others == rows
    given = pq.read_table(prompts)
    assert pq.read_table(outputs[0]).select(given.column_names).equals(given)
    for row in rows:
        assert [len(ids) for ids in row["response_ids"]] == [len(lps) for lps in row["response_log_probs"]]

    scores = tmp_path / "scores.json"
    own = (f"data.val_files={outputs[0]}", "placement.replicas.reward=2")
    shown = await said(0, "evaluate", file, "--output", str(scores), *own)
    found = json.loads(scores.read_text())
    assert found["metrics"] == expected
    assert any("acc/maj@4" in name for name in expected)
    assert found["num_prompts"] == {"digits": 5, "numbers": 6}
    assert "digits" in shown
    assert "mean@4" in shown


async def test_the_commands_of_the_page_are_run_as_they_stand(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a job file that says nothing of either: n = 4 is in the first command alone."""
    page = (Path(__file__).parents[2] / "docs" / "generate-and-evaluate.md").read_text(encoding="utf-8")
    block = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    commands = [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines()]
    monkeypatch.chdir(tmp_path)
    written(small_job(tmp_path, tiny_model, "run"), tmp_path)
    write_data(tmp_path, "test", 22)
    outputs = [await said(0, *command) for command in commands]
    assert "out.parquet: 22 rows\n" in outputs[0]
    assert "mean@4" in outputs[1]
    assert "left out" not in outputs[1]
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["n"] == 4
    assert sum(scores["num_prompts"].values()) == 22
    fewer = await said(0, *commands[1], "data.val_max_samples=16")
    assert "16 rows are evaluated (left out of 22 rows: 6 by data.val_max_samples)" in fewer


async def test_a_killed_generation_resumes_to_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    keys = (*SAMPLED, "data.val_batch_size=1", "data.max_response_length=48", "rollout.max_num_seqs=4")
    prompts = write_data(tmp_path, "held_out", 24)
    job = small_job(tmp_path, tiny_model, "run", *keys, f"data.val_files={prompts}")
    file = written(job, tmp_path)
    unbroken, output = tmp_path / "unbroken.parquet", tmp_path / "out.parquet"
    parts = tmp_path / "out.parquet.parts"
    await said(0, "generate", file, "--output", str(unbroken))

    async with rolemesh("generate", file, "--output", str(output)) as launched:
        ended = launched.ended()
        while len(list(parts.glob("part-*.parquet"))) < 3:
            assert not ended.done()
            await asyncio.sleep(0.005)
        launched.process.kill()
        assert await ended == -9
    kept = len(list(parts.glob("part-*.parquet")))
    assert 3 <= kept < 24
    assert not output.exists()

    refused = await said_here(
        2, "generate", file, "--output", str(output), "rollout.val_kwargs.temperature=0.5"
    )
    assert "rollout.val_kwargs.temperature was 1.0 and is 0.5; restore these" in refused
    assert len(list(parts.glob("part-*.parquet"))) == kept

    again = await said(0, "generate", file, "--output", str(output), "placement.replicas.rollout=2")
    assert f"{kept} of 24 prompts are kept" in again
    assert output.read_bytes() == unbroken.read_bytes()
    assert not parts.exists()
    assert "is complete already" in await said_here(0, "generate", file, "--output", str(output))
    other = await said_here(2, "generate", file, "--output", str(output), "rollout.seed=7")
    assert "exists, and was not made by these settings" in other
    assert output.read_bytes() == unbroken.read_bytes()
