"""What a plug-in's code raises names the part, and a part that cannot work is refused before a generation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import job_of as rollout_job
from generation import prompts_of
from in_process import small_job, train
from serving import served

from rolemesh.catalog.catalog import BUILT_IN, Declaration
from rolemesh.catalog.plugin_imports import NAMED, forget
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.data.row_source import load_rows
from rolemesh.errors import InvalidBatch, InvalidConfig, RewardFailed, RoleFailed, RolemeshError
from rolemesh.services.actor.objective import check_policy_loss
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.role_clients import new_client
from rolemesh.services.controller.stages.dynamic_sampling import SearchStopped
from rolemesh.services.reward.scoring_process import scorer_of
from rolemesh.services.rollout.worker import RolloutWorker

IMPORTS = "from rolemesh.plugins import *\nfrom rolemesh.algos.policy_loss import TokenLosses\n"
READS = 'reads=("token_level_rewards", "response_mask")'
ESTIMATOR = {"algorithm": {"adv_estimator": "f"}}
PAGE = {"algorithm": {"adv_estimator": "grpo", "page": "f"}, "rollout": {"n": 2}}
LOSS = {"actor": {"policy_loss": {"loss_mode": "f"}}}
CPU = torch.device("cpu")

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a plug-in's file and returns its path. What it declared is forgotten after the test."""

    def written(code: str) -> str:
        (tmp_path / "mine.py").write_text(IMPORTS + code)
        return str(tmp_path / "mine.py")

    yield written
    forget(str(tmp_path / "mine.py"))


def load_training_rows(job: Any) -> None:
    load_rows([], job.data, "train").rows([0])


# ------------------------------------------------------------------------------ what it raises


@pytest.mark.parametrize(
    ("code", "sections", "use", "part", "line"),
    [
        (f'@estimator("f", {READS})\ndef f(r, m):\n    return 1 / 0', ESTIMATOR, record_step,
         "advantage estimator f", 5),
        ('def helper():\n    return 1 / 0\n\n@page("f")\nasync def f(prompts, roles, step):\n    helper()',
         PAGE, record_step, "page f", 4),
        ('@policy_loss("f")\ndef f(new, old, advantages, mask):\n    return 1 / 0', LOSS,
         lambda job: check_policy_loss(job, CPU), "policy loss f", 5),
        ('@dataset("f")\ndef f(files, config, split):\n    return 1 / 0', {"data": {"dataset": "f"}},
         load_training_rows, "data set f", 5),
        ('class Rows(list):\n    def __getitem__(self, row): return 1 / 0\n\n'
         '@dataset("f")\ndef f(files, config, split): return Rows("a")', {"data": {"dataset": "f"}},
         load_training_rows, "data set f", 4),
    ],
)  # fmt: skip
def test_an_error_of_a_part_names_the_part_its_origin_and_line(
    write: Write, caplog: pytest.LogCaptureFixture, code: str, sections: Any, use: Any, part: str, line: int
) -> None:
    """The traceback is logged."""
    file = write(code)
    with pytest.raises(RoleFailed) as raised:
        use(make_job({"plugins": [file], **sections}))
    said = f"{part} of {file} raised ZeroDivisionError: division by zero (mine.py, line {line})"
    assert str(raised.value) == said
    assert caplog.messages == [said]
    assert f'File "{file}", line {line}' in caplog.text


def test_a_reward_manager_that_raises_is_named_once(write: Write) -> None:
    file = write('@reward_manager("f")\ndef f(compute_score, rows):\n    return 1 / 0')
    scorer = scorer_of(make_job({"plugins": [file], "reward": {"reward_manager": "f"}}).reward)
    with pytest.raises(RewardFailed, match=rf"^reward manager f of {file} raised ZeroD.*mine\.py, line 5\)$"):
        scorer.score([{}])


@pytest.mark.parametrize("error", [InvalidBatch("wrong"), SearchStopped()])
def test_an_error_of_rolemesh_stays_as_it_is(error: RolemeshError) -> None:
    with pytest.raises(type(error)) as raised, Declaration(name="f", code=len, origin="f.py").errors_named():
        raise error
    assert raised.value is error


def test_an_error_of_a_built_in_part_stays_as_it_is() -> None:
    with pytest.raises(KeyError), Declaration(name="f", code=len).errors_named():
        raise KeyError


# Raises for more than the one row that it is tried with.
LATE = """
@policy_loss("f")
def f(log_probs, old_log_probs, advantages, response_mask):
    if len(log_probs) > 1:
        raise KeyError("late")
    return TokenLosses(-advantages * log_probs)
"""


async def test_a_run_ends_with_the_name_of_the_loss_that_raised(
    write: Write, tiny_model: Path, tmp_path: Path
) -> None:
    file = write(LATE)
    job = small_job(tmp_path, tiny_model, "run", f"plugins=[{file}]", "actor.policy_loss.loss_mode=f")
    with pytest.raises(
        RoleFailed, match=rf"policy loss f of {file} raised KeyError: 'late' \(mine.py, line 7\)"
    ):
        await train(job)


ENGINE = """
@engine("f")
def f(job, worker):
    from rolemesh.services.rollout.engines.hf import HfEngine

    class Own(HfEngine):
        def sample(self, logits, uniforms, sampling):
            raise KeyError("no token")

        async def sleep(self):
            raise KeyError("no bed")

    return Own(job, worker)
"""


async def test_an_error_of_an_engine_method_reaches_the_client_by_name(write: Write, tiny_model: Path) -> None:
    file = write(ENGINE)
    job = make_job(merge(rollout_job(tiny_model, name="hf").model_dump(), {"plugins": [file]}))
    job = make_job(merge(job.model_dump(), {"rollout": {"name": "f"}}))
    said = rf"rollout\.Generate at .*: engine f of {file} raised KeyError: 'no token' \(mine\.py, line 10\)"
    async with served("rollout", job) as addresses, new_client("rollout", addresses, job) as client:
        await client.wait_until_ready(60)
        with pytest.raises(RoleFailed, match=said):
            async for _ in client.generate(prompts_of(2)):
                pass


# ------------------------------------------------------------------------ what it is declared with


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f'@estimator("f", {READS}, keys=("gamma",))\ndef f(r, m): pass',
         r"'f': its function should take \(token_level_rewards, response_mask, \*, gamma\): got .*'gamma'"),
        (f'class O(Options):\n    scale: float = 1\n\n@estimator("f", {READS}, options=O)\ndef f(r, m): pass',
         r"\(token_level_rewards, response_mask, \*, scale\)"),
        ('@policy_loss("f")\ndef f(new, old, advantages): pass',
         r"\(log_probs, old_log_probs, advantages, response_mask\): too many positional"),
        ('@policy_loss("f", corrects=True)\ndef f(new, old, advantages, mask): pass', r"\*, correction\)"),
        ('@page("f")\nasync def f(prompts, roles): pass', r"\(prompts, roles, step\)"),
        ('@engine("f")\ndef f(job): pass', r"\(job, worker\)"),
        ('@reward_manager("f")\ndef f(compute_score, rows, *, top): pass',
         r"\(compute_score, rows\): missing.*'top'"),
        ('@dataset("f")\ndef f(files): pass', r"\(files, config, split\)"),
    ],
)  # fmt: skip
def test_a_function_with_other_arguments_is_refused_at_import(write: Write, code: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        make_job({"plugins": [write(code)]})


def test_a_function_without_a_signature_is_taken_as_it_is(write: Write) -> None:
    make_job({"plugins": [write('dataset("f")(dict)')], "data": {"dataset": "f"}})


@pytest.mark.parametrize(
    "part",
    [part for catalog in NAMED.values() for part in catalog.values() if part.origin == BUILT_IN],
    ids=lambda part: f"{part.kind} {part.name}",
)
def test_rolemeshs_own_parts_take_what_is_asked_of_a_plug_ins(part: Declaration) -> None:
    positional, keywords = part.arguments()
    inspect.signature(part.load()).bind(*positional, **dict.fromkeys(keywords))


async def test_a_loss_without_token_losses_is_refused_at_actor_load(
    write: Write, tiny_model: Path, tmp_path: Path
) -> None:
    file = write('@policy_loss("f")\ndef f(new, old, advantages, mask): return -advantages * new')
    job = small_job(tmp_path, tiny_model, "run", f"plugins=[{file}]", "actor.policy_loss.loss_mode=f")
    with pytest.raises(InvalidConfig, match=rf"policy loss f of {file} should return TokenLosses .* Tensor"):
        async with served("actor", job):
            pass


def test_a_loss_is_tried_with_what_the_job_adds_to_it(write: Write) -> None:
    code = (
        '@policy_loss("f", choose=len, corrects=True, keys=("clip_low",))\n'
        "def f(new, old, advantages, mask, *, chosen, correction, clip_low):\n"
        "    assert chosen.shape == mask.shape and new.requires_grad and correction.bypass_mode\n"
        "    return TokenLosses(-advantages * new)\n"
    )
    actor = {"policy_loss": {"loss_mode": "f"}, "use_kl_loss": True, "entropy_coeff": 0.1}
    correction = {"rollout_correction": {"bypass_mode": True}}
    check_policy_loss(make_job({"plugins": [write(code)], "actor": actor, "algorithm": correction}), CPU)


def test_the_refusal_of_an_engine_names_the_methods_it_lacks(write: Write, tiny_model: Path) -> None:
    code = (
        "class Own:\n    version, vocabulary, weights = 0, 259, {}\n"
        "    def generate(self, prompts, sampling): ...\n    async def watch(self): ...\n"
        '    def close(self): ...\n\n@engine("f")\ndef f(job, worker): return Own()\n'
    )
    job = make_job({"plugins": [write(code)], "rollout": {"name": "f"}})
    with pytest.raises(
        InvalidConfig, match=r"engine f of .*mine\.py .* Own .* lacks load_weights, sleep, wake$"
    ):
        RolloutWorker(job)
