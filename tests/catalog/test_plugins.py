"""Plug-ins: what a job's files and modules declare, and what is said of those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rolemesh.algos.aggregation import BatchCounts
from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.plugin_imports import NAMED, forget, load_plugins
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, InvalidData, RolemeshError
from rolemesh.services.actor.objective import policy_objective
from rolemesh.services.controller.pages import grpo
from rolemesh.services.controller.pages.choice import record_step

IMPORTS = "from rolemesh.plugins import *\nfrom rolemesh.algos.policy_loss import TokenLosses\n"
READS = 'reads=("token_level_rewards", "response_mask")'

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Writes a plug-in's file and returns its path. What it declared is forgotten after the test."""

    def written(code: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(IMPORTS + code)
        return str(tmp_path / name)

    yield written
    for origin in {part.origin for catalog in NAMED.values() for part in catalog.values()} - {BUILT_IN}:
        forget(origin)


def job_of(file: str, **sections: Any) -> Any:
    return make_job({"plugins": [file], "rollout": {"n": 2}, **sections})


ESTIMATOR = f"""
class Own(Options):
    scale: float = 2.0

@estimator("own", {READS}, options=Own)
def own(rewards, mask, *, scale):
    return rewards * scale, rewards
"""


def test_an_estimator_gets_its_columns_and_its_default_options(write: Write) -> None:
    file = write(ESTIMATOR)
    assert job_of(file, algorithm={"adv_estimator": "own"}).algorithm.options == {"scale": 2.0}
    job = job_of(file, algorithm={"adv_estimator": "own", "options": {"scale": 3}})
    assert (job.estimator.origin, job.algorithm.options) == (file, {"scale": 3.0})
    assert job.estimator.load()(2.0, None, **job.algorithm.options) == (6.0, 2.0)
    assert "controller.compute_advantages" in record_step(job).to_text()


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"adv_estimator": "own", "options": {"scal": 1}}, "unknown key 'scal'; did you mean 'scale'"),
        ({"adv_estimator": "own", "options": {"scale": "x"}}, "own: 'scale' is 'x'"),
        ({"adv_estimator": "gae", "options": {"scale": 1}}, "adv_estimator gae has no options"),
        ({"adv_estimator": "grpo", "page_options": {"x": 1}}, "page is null; name the page, too"),
        ({"adv_estimator": "owm"}, r"of /.*mine\.py: own; did you mean 'own'\?"),
    ],
)
def test_a_wrong_name_or_option_is_refused_with_what_is_known(
    write: Write, algorithm: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        job_of(write(ESTIMATOR), algorithm=algorithm)


def test_a_changed_file_is_imported_again_and_a_bad_one_retried(write: Write) -> None:
    job_of(write(ESTIMATOR))
    with pytest.raises(InvalidConfig, match=r"mine\.py could not be imported: ZeroDivisionError"):
        job_of(write(f"{ESTIMATOR}\n1 / 0"))
    file = write(ESTIMATOR)  # as it was: its declarations are back
    assert ESTIMATORS["own"].origin == job_of(file, algorithm={"adv_estimator": "own"}).estimator.origin
    job_of(write(ESTIMATOR.replace('"own"', '"other"')))
    assert "own" not in ESTIMATORS


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f'@estimator("rloo", {READS})\ndef f(r, m): pass', "'rloo', which rolemesh has declared already"),
        ('@page("f")\ndef f(): pass', "the page 'f' should be an `async def`"),
        ("def f(:", r"could not be imported: SyntaxError: .*mine.py, line 3\)$"),
        ("import nothing_here", r"ModuleNotFoundError: .*mine.py, line 3\)$"),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_file(write: Write, code: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said) as refused:
        job_of(write(code))
    assert "mine.py" in str(refused.value)


def test_a_module_that_is_not_found_says_where_it_is_looked_for() -> None:
    with pytest.raises(InvalidConfig, match="'no_such_module'; install its package, or set PYTHONPATH"):
        load_plugins(["no_such_module"])


@pytest.mark.parametrize(
    ("code", "section", "said"),
    [
        (f'@estimator("f", {READS}, keys=("gama",))\ndef f(r, m, *, gama): return r, r',
         {"algorithm": {"adv_estimator": "f"}}, "f of .* declares the key 'gama'"),
        ('@policy_loss("f", keys=("clip_hi",))\ndef f(*a, **k): pass',
         {"actor": {"policy_loss": {"loss_mode": "f"}}}, "f of .* declares the key 'clip_hi'"),
    ],
)  # fmt: skip
def test_a_key_that_the_job_file_does_not_have_is_refused(
    write: Write, code: str, section: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        job_of(write(code), **section)


PAGE = f"""
class Own(Options):
    times: int = 1

@page("own_page", options=Own)
async def step(prompts, roles, step, *, times):
    from rolemesh.services.controller.pages.grpo import grpo_step
    assert times in (1, 2)
    return await grpo_step(prompts, roles, step)

@estimator("own", {READS}, page="own_page")
def own(rewards, mask):
    return rewards, rewards
"""


WITHOUT_KL = """
from rolemesh.services.controller.pages.grpo import grpo_step

@page("f")
async def f(prompts, roles, step):
    metrics = await grpo_step(prompts, roles, step)
    return {name: value for name, value in metrics.items() if "kl" not in name}
"""


def test_an_estimators_own_page_gets_its_default_options(write: Write) -> None:
    file = write(PAGE)
    job = job_of(file, algorithm={"adv_estimator": "own"})
    assert (job.page.name, job.page_options) == ("own_page", {"times": 1})
    record_step(job)
    named = {"adv_estimator": "own", "page": "own_page", "page_options": {"times": 2}}
    assert job_of(file, algorithm=named).page_options == {"times": 2}


def test_an_estimators_own_page_is_named_if_it_lacks_a_default(write: Write) -> None:
    """One of its options has no default."""
    file = write(PAGE.replace("times: int = 1", "times: int"))
    with pytest.raises(InvalidConfig, match="page own_page has options without defaults"):
        job_of(file, algorithm={"adv_estimator": "own"})


@pytest.mark.parametrize(
    ("code", "algorithm", "said"),
    [
        ('@page("f")\nasync def f(prompts, roles, step): return {}', {"adv_estimator": "grpo", "page": "f"},
         "page f of .* should end with `return step.report"),
        (WITHOUT_KL, {"adv_estimator": "grpo", "page": "f", "use_kl_in_reward": True},
         "use_kl_in_reward is true, but page f of .* does not report the KL"),
        (f'@estimator("f", {READS})\ndef f(r, m): return r', {"adv_estimator": "f"},
         r"should return \(advantages, returns\); it returned a Tensor"),
        (f'@estimator("f", {READS})\ndef f(r, m): return r.double(), r', {"adv_estimator": "f"},
         "should return advantages as float32"),
        ('@estimator("f", reads=("token_level_reward",))\ndef f(r): return r, r', {"adv_estimator": "f"},
         "reads column 'token_level_reward', which the batch does not have"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_work_is_refused_before_a_model_loads(
    write: Write, code: str, algorithm: dict[str, Any], said: str
) -> None:
    job = job_of(write(code), algorithm=algorithm)
    with pytest.raises(RolemeshError, match=said):
        record_step(job)


UPDATE = "    actor_metrics = await roles.actor.update(batch)\n"
SYNC = "    await roles.sync_weights(step.number)\n"
PUBLISH = "    weights = await roles.actor.publish_weights(step.number)\n"
TAKE = "    await roles.rollout.update_weights(weights)\n"


@pytest.mark.parametrize(
    ("training", "lags"),
    [
        (UPDATE + SYNC, False),
        (SYNC + UPDATE + SYNC, False),
        (UPDATE, True),
        (SYNC + UPDATE, True),
        (UPDATE + SYNC + UPDATE, True),
        (UPDATE + PUBLISH + TAKE, False),
        (PUBLISH + UPDATE + TAKE, True),
        ("    actor_metrics = {}\n", False),  # nothing is learnt
    ],
)
def test_a_page_that_leaves_rollouts_older_weights_is_refused(write: Write, training: str, lags: bool) -> None:
    code = Path(grpo.__file__).read_text().replace("from __future__ import annotations\n", "")
    assert UPDATE + SYNC in code
    own = code.replace("async def grpo_step", '@page("f")\nasync def f').replace(UPDATE + SYNC, training)
    job = job_of(write(own), algorithm={"adv_estimator": "grpo", "page": "f"})
    said = r"^page f of .*, one step: it ends while the rollouts have older .* call `await roles\.sync_weights"
    with pytest.raises(InvalidConfig, match=said) if lags else nullcontext():
        record_step(job)


@pytest.mark.parametrize("page", ["sft", "dpo"])
def test_a_page_without_scores_refuses_a_kl_in_the_rewards(page: str) -> None:
    job = make_job({"algorithm": {"page": page, "use_kl_in_reward": True}})
    with pytest.raises(InvalidConfig, match="does not report the KL: set use_kl_in_reward to false"):
        record_step(job)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_a_page_with_its_own_losses_keeps_them_in_bypass_mode(write: Write, loss_type: str) -> None:
    """A recipe with bypass_mode may lie over any job."""
    code = (
        '@policy_loss("mine", reads=())\ndef mine(log_probs, response_mask): return TokenLosses(-log_probs)\n'
        '@page("own", losses=("mine",))\nasync def own(prompts, roles, step): return {}'
    )
    correction = {"rollout_correction": {"bypass_mode": True, "loss_type": loss_type}}
    assert job_of(write(code), algorithm={"page": "own"} | correction).policy_loss.name == "mine"
    for page in ("sft", "dpo"):
        job = make_job({"algorithm": {"page": page} | correction, "actor": {"ppo_epochs": 2}})
        assert job.policy_loss.name == page
        record_step(job)


@pytest.mark.parametrize(
    "returned", ["-advantages * log_probs", "TokenLosses((-advantages * log_probs).sum(1))"]
)
def test_a_policy_loss_that_returns_no_token_losses_is_named(write: Write, returned: str) -> None:
    code = f'@policy_loss("f")\ndef f(log_probs, old_log_probs, advantages, response_mask): return {returned}'
    job = job_of(write(code), actor={"policy_loss": {"loss_mode": "f"}})
    zeros, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    rows = DataProto({"response_mask": mask, "old_log_probs": zeros, "advantages": zeros})
    with pytest.raises(InvalidConfig, match=r"policy loss f of .* losses of shape \[2, 3\]"):
        policy_objective(zeros, None, rows, BatchCounts.of(mask), job)


def test_a_data_set_without_rows_is_refused_by_name(write: Write) -> None:
    from rolemesh.data.row_source import load_rows

    job = job_of(write('@dataset("f")\ndef f(files, config, split): return []'), data={"dataset": "f"})
    with pytest.raises(InvalidData, match="data set f returned no rows for split 'val'"):
        load_rows([], job.data, "val")


def test_a_table_with_its_own_where_is_no_source_of_rows(write: Write) -> None:
    """As a DataFrame of pandas, whose `[0]` is a column."""
    from rolemesh.data.row_source import load_rows

    code = (
        "class Frame(dict):\n    def where(self, condition): ...\n"
        '@dataset("f")\ndef f(files, config, split): return Frame(prompt=["2+2="])'
    )
    source = load_rows([], job_of(write(code), data={"dataset": "f"}).data, "train")
    with pytest.raises(RolemeshError, match=r"data set f of .*KeyError: 0"):
        source.rows([0])


def test_rolemeshs_own_parts_are_of_rolemesh() -> None:
    assert {
        part.origin for catalog in NAMED.values() for part in catalog.values() if "rolemesh." in str(part.code)
    } == {BUILT_IN}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("(on, on.sum(1))", r"should return returns as float32 \[B, T\] \[\d+, 4\]; it returned .*\[\d+\]"),
        ("(on.double(), on)", r"should return advantages as float32 .*; it returned \[torch\.float64"),
        ("(on, 0.0)", r"should return returns as float32 .*; it returned float"),
    ],
)
def test_an_estimators_result_is_checked_against_the_contract(tmp_path: Path, returned: str, said: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "from rolemesh.plugins import estimator\n"
        '@estimator("wrong", reads=("token_level_rewards",))\n'
        f"def wrong(on):\n    return {returned}\n"
    )
    job = make_job({"plugins": [str(path)], "algorithm": {"adv_estimator": "wrong"}})
    try:
        with pytest.raises(InvalidConfig, match=rf"estimator wrong of {path} {said}"):
            record_step(job)
    finally:
        ESTIMATORS.remove(str(path))
