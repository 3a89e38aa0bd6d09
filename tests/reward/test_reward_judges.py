"""Scoring in other processes: in parallel, in order, and whatever a function does costs its own row alone."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from reward_rows import batch, custom, job

from rolemesh.catalog.loading import forget
from rolemesh.config.job import make_job
from rolemesh.config.reward import RewardConfig
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.services.reward.scoring_pool import Judges
from rolemesh.services.reward.worker import RewardWorker

ADDS = "```python\nprint(sum(map(int, input().split())))\n```"


@asynccontextmanager
async def working(model: Path, **reward: Any) -> AsyncIterator[RewardWorker]:
    worker = RewardWorker(job(model, **reward))
    try:
        yield worker
    finally:
        worker.close()


OTHERS: set[int] = set()  # what other tests have started and not ended


@pytest.fixture(autouse=True)
def _others() -> None:
    OTHERS.clear()
    OTHERS.update(children())


def children() -> set[int]:
    """Processes that a test has started here and that still run."""
    while True:
        try:
            tasks = list(Path("/proc/self/task").iterdir())
            found = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
            return found - OTHERS
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread has ended meanwhile, and its children are another's


async def scores(worker: RewardWorker, *responses: str) -> list[float]:
    answered = await worker.compute_scores(batch(*[("mine", response, None) for response in responses]))
    return answered["token_level_scores"].sum(1).tolist()  # type: ignore[no-any-return]


async def test_scores_are_in_the_order_of_the_rows_and_equal_those_of_one_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A row ends when as many processes as there should be have had one: with fewer, none would ever end."""
    responses = ["x" * (1 + i * 7 % 20) for i in range(60)]
    for num_workers in (3, 1):
        seen = tmp_path / f"seen-{num_workers}"
        seen.mkdir()
        source = (
            f"import os, pathlib, time\nSEEN = pathlib.Path({str(seen)!r})\n"
            "def compute_score(solution_str, **row):\n"
            "    (SEEN / str(os.getpid())).touch()\n"
            f"    while len(list(SEEN.iterdir())) < {num_workers}: time.sleep(0.01)\n"
            "    return len(solution_str)\n"
        )
        function = custom(tmp_path, source)
        async with working(tiny_model, num_workers=num_workers, timeout_s=200.0, **function) as worker:
            assert await scores(worker, *responses) == [len(response) for response in responses]
            assert {int(path.name) for path in seen.iterdir()} == children()


async def test_rows_are_scored_at_the_same_time_and_the_event_loop_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Each row waits until all three have begun: one after the other, none would ever end."""
    source = (
        "import os, pathlib, time\n"
        f"HERE = pathlib.Path({str(tmp_path)!r})\n"
        "def compute_score(extra_info, **row):\n"
        "    (HERE / f'row-{extra_info[\"index\"]}').touch()\n"
        "    while len(list(HERE.glob('row-*'))) < 3: time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    async with working(tiny_model, num_workers=3, timeout_s=60.0, **custom(tmp_path, source)) as worker:
        scoring = asyncio.create_task(scores(worker, "a", "b", "c"))
        turns = 0
        while not scoring.done():
            await asyncio.sleep(0)
            turns += 1
        assert scoring.result() == [1.0, 1.0, 1.0]
        assert turns > 100


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process that scored it was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"was killed by SIGKILL \(out of memory\?\)"),
        ("sys.exit(3)", "exited with code 3"),
        ("os._exit(0)", "exited with code 0"),
        ("time.sleep(600)", r"not scored within reward.timeout_s, 8 s"),
        ("print(1 / 0)", r"raised ZeroDivisionError: division by zero \(.*mine.py, line 4\)"),
    ],
)
async def test_a_function_that_ends_its_process_or_hangs_costs_its_row_alone(
    tiny_model: Path, tmp_path: Path, does: str, said: str
) -> None:
    source = (
        "import os, signal, sys, time\n"
        "def compute_score(solution_str, **row):\n    if solution_str == 'bad':\n"
        f"        {does}\n    return 1.0\n"
    )
    timeout_s = 8.0 if "sleep" in does else 60.0
    async with working(tiny_model, num_workers=1, timeout_s=timeout_s, **custom(tmp_path, source)) as worker:
        with pytest.raises(RewardFailed, match=f"row train-000001: .*{said}"):
            await scores(worker, "good", "bad", "good")
        assert await scores(worker, "good", "good") == [1.0, 1.0]
    assert not children()


def test_a_rows_time_begins_when_its_process_has_loaded_the_function(tmp_path: Path) -> None:
    """The process starts, though a new interpreter takes longer than a millisecond."""
    function = custom(tmp_path, "def compute_score(**row): return 1.0\n")
    judges = Judges(RewardConfig(timeout_s=0.001, num_workers=1, **function))
    try:
        judges.start()
    finally:
        judges.close()


async def test_a_scoring_process_imports_little_besides_the_functions_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    source = (
        "import sys\n"
        "HEAVY = sys.modules.keys() & {'numpy', 'pydantic', 'rolemesh.catalog', 'rolemesh.config', 'torch'}\n"
        "def compute_score(**row):\n    return {'score': len(HEAVY), 'pred': sorted(HEAVY)}\n"
    )
    async with working(tiny_model, **custom(tmp_path, source)) as worker:
        answered = await worker.compute_scores(batch(("mine", "x", None)))
        assert list(answered["reward_extra_info"]) == [{"pred": "[]"}]


async def test_a_plug_ins_manager_scores_in_other_processes_with_its_options(
    tiny_model: Path, tmp_path: Path
) -> None:
    """They import the plug-in and check its options again, so a path is a path and not JSON's text."""
    plugin = tmp_path / "scaled.py"
    plugin.write_text(
        "from pathlib import Path\nfrom rolemesh.plugins import Options, reward_manager\n"
        "class Scale(Options):\n    scale: float = 1.0\n    file: Path = Path('x')\n"
        "@reward_manager('scaled', options=Scale)\n"
        "def scaled(compute_score, rows, *, scale, file):\n"
        "    assert file.name == 'y'\n"
        "    return [scale * compute_score(**row)['score'] for row in rows]\n"
    )
    reward = {"reward_manager": "scaled", "options": {"scale": 1.5, "file": "x/y"}}
    sections = {**job(tiny_model).model_dump(), "plugins": [str(plugin)], "reward": reward}
    worker = RewardWorker(make_job(sections))
    try:
        rows = batch(("openai/gsm8k", "#### 7", "7"), ("openai/gsm8k", "8", "7"))
        answered = await worker.compute_scores(rows)
    finally:
        worker.close()
        forget(str(plugin))
    assert answered["token_level_scores"].sum(1).tolist() == [1.5, 0.0]


async def test_a_function_that_forks_answers_once(tiny_model: Path, tmp_path: Path) -> None:
    """The parent's score is the row's; it waits for the child, so that an answer of the child's came first."""
    source = (
        "import os\ndef compute_score(solution_str, **row):\n"
        "    if solution_str == 'forks':\n"
        "        child = os.fork()\n        if child == 0: return 0.25\n        os.waitpid(child, 0)\n"
        "    return len(solution_str)\n"
    )
    async with working(tiny_model, num_workers=1, timeout_s=60.0, **custom(tmp_path, source)) as worker:
        assert await scores(worker, "a", "forks", "abc", "ab") == [1.0, 5.0, 3.0, 2.0]


async def test_an_answer_to_another_row_costs_one_row_and_the_process(tiny_model: Path, tmp_path: Path) -> None:
    """The function writes on the process's line itself: an answer too many, by the number of the row before."""
    source = (
        "import sys\nfrom multiprocessing.connection import Connection\n"
        "def compute_score(solution_str, **row):\n"
        "    if solution_str == 'bad':\n"
        "        line = Connection(int(sys.argv[1]))\n"
        '        line.send_bytes(b\'2 {"verdicts": [{"score": 9, "acc": 9, "entries": {}}]}\')\n'
        "    return 1.0\n"
    )
    async with working(tiny_model, num_workers=1, **custom(tmp_path, source)) as worker:
        assert await scores(worker, "good") == [1.0]
        [before] = children()
        with pytest.raises(RewardFailed, match=r"row train-000000: .* sent an answer to another message"):
            await scores(worker, "bad")
        assert await scores(worker, "good", "good") == [1.0, 1.0]
        assert before not in children()


async def test_the_first_row_that_fails_is_the_one_that_is_named(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "import time\ndef compute_score(solution_str, **row):\n"
        "    if solution_str == 'late': time.sleep(0.3)\n"
        "    raise ValueError(solution_str)\n"
    )
    async with working(tiny_model, num_workers=2, **custom(tmp_path, source)) as worker:
        with pytest.raises(RewardFailed, match=r"row train-000000: .*ValueError: late"):
            await scores(worker, "late", "soon")


async def test_a_row_that_fails_is_told_while_a_later_one_is_still_scored(
    tiny_model: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "never")
    source = (
        "def compute_score(solution_str, **row):\n"
        f"    open({str(tmp_path / 'never')!r}) if solution_str == 'hangs' else {{}}['nothing']\n"
    )
    async with working(tiny_model, num_workers=2, timeout_s=250, **custom(tmp_path, source)) as worker:
        with pytest.raises(RewardFailed, match=r"row train-000000: .*nothing"):
            await asyncio.wait_for(scores(worker, "fails", "hangs"), 60)


async def test_who_waits_in_line_when_the_role_is_closed_is_told(tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)
    source = (
        f"def compute_score(**row):\n    open({str(tmp_path / 'begun')!r}, 'w').write('x')\n"
        f"    open({str(tmp_path / 'never')!r})\n"
    )
    worker = RewardWorker(job(tiny_model, num_workers=2, timeout_s=250, **custom(tmp_path, source)))
    calls = [asyncio.create_task(scores(worker, "a", "b")) for _ in range(3)]
    for _ in range(2):
        assert await asyncio.to_thread(os.read, begun, 1) == b"x"
    await asyncio.to_thread(worker.close)
    for told in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60):
        assert isinstance(told, RewardFailed)
    os.close(begun)


async def test_after_a_row_that_fails_nobody_begins_with_another(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "def compute_score(solution_str, **row):\n"
        f"    open({str(tmp_path / 'called')!r}, 'a').write(solution_str)\n"
        "    return {}['nothing'] if solution_str == 'b' else 1.0\n"
    )
    async with working(tiny_model, num_workers=1, **custom(tmp_path, source)) as worker:
        with pytest.raises(RewardFailed, match=r"row train-000001: "):
            await scores(worker, "a", "b", "c", "d")
        assert await scores(worker, "e", "f") == [1.0, 1.0]
    assert (tmp_path / "called").read_text() == "abef"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1 / 0\n", "raised ZeroDivisionError"),
        ("def other(): ...\n", r"no function 'compute_score'.*\['other'\]"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_start(
    tiny_model: Path, tmp_path: Path, source: str, said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        RewardWorker(job(tiny_model, **custom(tmp_path, source)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_judges_end_with_the_service_however_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    """The function hangs, and is deaf to signals that can be ignored."""
    function = tmp_path / "mine.py"
    function.write_text(
        "import os, signal, time\n"
        "def compute_score(**row):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    print(os.getpid(), flush=True)\n"
        "    while True: time.sleep(60)\n"
    )
    source = (
        "from rolemesh.config.reward import RewardConfig\n"
        "from rolemesh.services.reward.scoring_pool import Call, Judges, Line\n"
        f"config = RewardConfig(custom_reward_function={{'path': {str(function)!r}}})\n"
        "line = Line([Call([0], [{'solution_str': 'x'}])], str)\nJudges(config).submit(line)\n"
        "line.verdicts.result()\n"
    )
    service = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    ended = os.pidfd_open(int(service.stdout.readline()))
    service.send_signal(number)
    service.wait()
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    assert waiting.poll(60_000), "a process that scores outlived its service"


# --------------------------------------------------------------------------------------- managers


async def test_the_batch_manager_calls_the_function_once_with_all_rows(
    tiny_model: Path, tmp_path: Path
) -> None:
    source = (
        "calls = 0\n"
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus):\n"
        "    global calls\n    calls += 1\n"
        "    assert data_sources == ['mine'] * 3 and ground_truths == [None] * 3\n"
        "    assert extra_infos[2] == {'index': 2}\n"
        "    return [{'score': len(text) + bonus, 'acc': calls} for text in solution_strs]\n"
    )
    config = custom(tmp_path, source)
    config["custom_reward_function"]["reward_kwargs"] = {"bonus": 0.5}
    async with working(tiny_model, reward_manager="batch", **config) as worker:
        answered = await worker.compute_scores(batch(*[("mine", "x" * n, None) for n in (3, 1, 2)]))
        assert answered["token_level_scores"].sum(1).tolist() == [3.5, 1.5, 2.5]
        assert answered["acc"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", ["numpy.float64", "bool", "object"])
async def test_a_batch_function_may_answer_with_an_array(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    source = (
        "import numpy\n"
        "def compute_score(solution_strs, **rows):\n"
        f"    return numpy.array([text == 'yes' for text in solution_strs], dtype={dtype})\n"
    )
    async with working(tiny_model, reward_manager="batch", **custom(tmp_path, source)) as worker:
        assert await scores(worker, "yes", "no", "yes") == [1.0, 0.0, 1.0]


async def test_a_batch_function_that_answers_for_fewer_rows_fails(tiny_model: Path, tmp_path: Path) -> None:
    function = custom(tmp_path, "def compute_score(**rows):\n    return [1.0]\n")
    async with working(tiny_model, reward_manager="batch", **function) as worker:
        with pytest.raises(RewardFailed, match=r"2 rows, train-000000 to train-000001: .*a list of 2 scores"):
            await scores(worker, "a", "b")


async def test_the_dapo_manager_takes_the_punishment_from_the_score_and_not_from_acc(tiny_model: Path) -> None:
    """data.max_response_length is 24 and a token a character (and one for the end): 11 tokens are below the
    buffer of 12, 18 are in its middle, 24 at its end."""
    texts = [answer + " " * (length - 1 - len(answer)) for answer, length in
             (("Answer: 7", 11), ("Answer: 7", 18), ("Answer: 8", 24))]  # fmt: skip
    overlong = {"enable": True, "len": 12, "penalty_factor": 1.0, "log": True}
    async with working(tiny_model, reward_manager="dapo", overlong_buffer=overlong) as worker:
        answered = await worker.compute_scores(batch(*[("math_dapo", text, "7") for text in texts]))
    assert answered["token_level_scores"].sum(1).tolist() == [1.0, 0.5, -2.0]
    assert answered["acc"].tolist() == [1.0, 1.0, 0.0]
    assert list(answered["reward_extra_info"]) == [
        {"overlong_reward": 0.0, "overlong": 0.0, "pred": "7"},
        {"overlong_reward": -0.5, "overlong": 1.0, "pred": "7"},
        {"overlong_reward": -1.0, "overlong": 1.0, "pred": "8"},
    ]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"reward_manager": "batch"}, "custom_reward_function.path is not set"),
        ({"overlong_buffer": {"enable": True, "len": 4}}, "reward_manager naive.*reward_manager to dapo"),
        ({"reward_manager": "dapo", "overlong_buffer": {"enable": True}}, "overlong_buffer.len is 0"),
        (
            {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 600}},
            "reward.overlong_buffer.len is 600, but data.max_response_length is 512",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        make_job({"reward": reward})


# -------------------------------------------------------------------------------- components, code


def with_components(model: Path, function: dict[str, Any]) -> RewardWorker:
    config = job(model, **function)
    algorithm = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["format", "right"]}
    return RewardWorker(make_job({**config.model_dump(), "algorithm": algorithm, "rollout": {"n": 2}}))


async def test_components_are_columns_in_the_order_of_the_keys(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "def compute_score(extra_info, **row):\n"
        "    return {'score': 1, 'right': extra_info['index'], 'format': -2}\n"
    )
    worker = with_components(tiny_model, custom(tmp_path, source))
    answered = await worker.compute_scores(batch(("mine", "x", None), ("mine", "y", None)))
    worker.close()
    assert answered["reward_components"].tolist() == [[-2.0, 0.0], [-2.0, 1.0]]
    assert answered["reward_extra_info"][1] == {"right": 1.0, "format": -2.0}


async def test_a_component_that_is_not_there_names_the_row(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "def compute_score(extra_info, **row):\n"
        "    return {'score': 1, 'format': 1, **({'right': 1} if extra_info['index'] == 0 else {})}\n"
    )
    worker = with_components(tiny_model, custom(tmp_path, source))
    with pytest.raises(RewardFailed, match=r"row train-000001: .*gdpo_reward_keys names 'right'"):
        await worker.compute_scores(batch(("mine", "x", None), ("mine", "y", None)))
    worker.close()


async def test_programs_and_mathematics_are_scored_beside_quick_rules(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that breaks out of nothing fails; the rows beside it have their scores, and nothing is left."""
    monkeypatch.setattr("reward_rows.T", 96)
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    rows = batch(
        ("taco", ADDS, tests),
        ("openai/gsm8k", "#### 3", "3"),
        ("apps", "```python\nwhile True: open('/tmp/x', 'w')\n```", tests),
        ("numina_cn_k12", r"\boxed{2/4}", r"\frac{1}{2}"),
        ("codeforces", "```python\nimport os\nwhile 1:\n  os.fork()\n```", tests),
    )
    async with working(tiny_model, num_workers=2) as worker:
        answered = await worker.compute_scores(rows)
        assert answered["acc"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert not children()
