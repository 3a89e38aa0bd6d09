"""Scoring in other processes: in parallel, in order, and whatever a function does costs its own row alone."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from reward_rows import batch, custom, job, scores, working

from rolemesh.config.reward import RewardConfig
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.services.reward.scoring_pool import ScoringPool, _ScoringProcess, first_message
from rolemesh.services.reward.worker import RewardWorker

ADDS = "```python\nprint(sum(map(int, input().split())))\n```"


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


async def test_scores_keep_row_order_and_equal_those_of_one_process(tiny_model: Path, tmp_path: Path) -> None:
    """A row ends when as many processes as there should be have had one: with fewer, none would ever end."""
    responses = ["x" * (1 + i * 7 % 20) for i in range(60)]
    for num_workers in (3, 1):
        seen = tmp_path / f"seen-{num_workers}"
        seen.mkdir()
        source = (
            f"import os, pathlib, time\nSEEN = pathlib.Path({str(seen)!r})\n"
            "def compute_score(solution_str, **row):\n"
            "    (SEEN / str(os.getppid())).touch()\n"
            f"    while len(list(SEEN.iterdir())) < {num_workers}: time.sleep(0.01)\n"
            "    return len(solution_str)\n"
        )
        function = custom(tmp_path, source)
        async with working(tiny_model, num_workers=num_workers, timeout_s=200.0, **function) as worker:
            assert await scores(worker, *responses) == [len(response) for response in responses]
            assert {int(path.name) for path in seen.iterdir()} == children()


async def test_rows_are_scored_in_parallel_beside_the_event_loop(tiny_model: Path, tmp_path: Path) -> None:
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
        ("time.sleep(600)", r"not scored within reward.timeout_s, 3 s"),
        ("print(1 / 0)", r"raised ZeroDivisionError: division by zero \(.*mine.py, line 4\)"),
    ],
)
async def test_a_function_that_exits_or_hangs_costs_only_its_row(
    tiny_model: Path, tmp_path: Path, does: str, said: str
) -> None:
    source = (
        "import os, signal, sys, time\n"
        "def compute_score(solution_str, **row):\n    if solution_str == 'bad':\n"
        f"        {does}\n    return 1.0\n"
    )
    timeout_s = 3.0 if "sleep" in does else 60.0
    async with working(tiny_model, num_workers=1, timeout_s=timeout_s, **custom(tmp_path, source)) as worker:
        with pytest.raises(RewardFailed, match=f"row train-000001: .*{said}"):
            await scores(worker, "good", "bad", "good")
        assert await scores(worker, "good", "good") == [1.0, 1.0]
    assert not children()


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


async def test_a_process_that_dies_between_two_rows_costs_none(tiny_model: Path, tmp_path: Path) -> None:
    """As one that the system kills for its memory."""
    source = "def compute_score(**row):\n    return 1.0\n"
    async with working(tiny_model, num_workers=1, **custom(tmp_path, source)) as worker:
        assert await scores(worker, "first") == [1.0]
        [before] = children()
        [inner] = await asyncio.to_thread(children_of, before)
        os.kill(inner, signal.SIGKILL)
        assert await asyncio.to_thread(has_ended, os.pidfd_open(before))
        assert await scores(worker, "second", "third") == [1.0, 1.0]
        assert before not in children()


def test_a_rows_time_starts_after_its_process_loads_the_function(tmp_path: Path) -> None:
    """The process starts, though a new interpreter takes longer than a millisecond."""
    function = custom(tmp_path, "def compute_score(**row): return 1.0\n")
    pool = ScoringPool(RewardConfig(timeout_s=0.001, num_workers=1, **function))
    try:
        pool.start()
    finally:
        pool.close()


async def test_a_scoring_process_imports_little_beside_the_function(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "HEAVY = sys.modules.keys() & {'numpy', 'pydantic', 'rolemesh.config', 'rolemesh.catalog.catalog', "
        "'torch'}\n"
        "def compute_score(**row):\n    return {'score': len(HEAVY), 'pred': sorted(HEAVY)}\n"
    )
    async with working(tiny_model, **custom(tmp_path, source)) as worker:
        answered = await worker.compute_scores(batch(("mine", "x", None)))
        assert list(answered["reward_extra_info"]) == [{"pred": "[]"}]


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


LINE = """
import os, signal, sys
from multiprocessing.connection import Connection

def compute_score(solution_str, **row):
    if solution_str == "closes":
        os.close(int(sys.argv[1]))
        signal.pause()
    if solution_str == "answers in part":
        os.write(int(sys.argv[1]), b"\\0\\0\\0")
        signal.pause()
    Connection.recv_bytes = lambda line: signal.pause()  # it does not read the next row
    return 1.0
"""


@pytest.mark.parametrize(
    ("response", "seconds", "said"),
    [
        ("closes", 2.0, "the process that scored it closed its connection; it was killed"),
        ("answers in part", 0.5, "late; its process was killed"),
        ("does not read", 0.5, "late; its process was killed"),
    ],
)
def test_a_process_with_a_broken_pipe_costs_at_most_a_rows_time(
    tmp_path: Path, response: str, seconds: float, said: str
) -> None:
    process = _ScoringProcess()
    try:
        assert process.ask(first_message(RewardConfig(**custom(tmp_path, LINE)), []), 200.0, "") == {}
        if response == "does not read":
            process.ask(json.dumps([{"solution_str": response}]).encode(), 60.0, "")
        # Longer than the line holds, except where the process has to read it before it is late.
        text = "" if response == "closes" else "x" * (4 << 20)
        message = json.dumps([{"solution_str": response, "text": text}]).encode()
        with pytest.raises(RewardFailed, match=f"^{said}"):
            process.ask(message, seconds, "late")
    finally:
        process.kill()
        process.close()


STARTS = """
import os, signal

def compute_score(solution_str, **row):
    if solution_str == "dies":
        os._exit(3)
    if os.fork() == 0:  # a daemon: in a session of its own, and its parent ends
        os.setsid()
        if os.fork() == 0:
            with open({begun!r}, "w") as begun:
                begun.write(str(os.getpid()))
            signal.pause()
        os._exit(0)
    os.wait()
    return 1.0
"""


@pytest.mark.parametrize("dies", [True, False])
async def test_processes_that_a_function_starts_end_with_its_process(
    tiny_model: Path, tmp_path: Path, dies: bool
) -> None:
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)
    function = custom(tmp_path, STARTS.format(begun=str(tmp_path / "begun")))
    async with working(tiny_model, num_workers=1, timeout_s=60.0, **function) as worker:
        assert await scores(worker, "starts") == [1.0]
        daemon = os.pidfd_open(int(await asyncio.to_thread(os.read, begun, 32)))
        if dies:
            with pytest.raises(RewardFailed, match="exited with code 3"):
                await scores(worker, "dies")
            assert await asyncio.to_thread(has_ended, daemon)
    assert has_ended(daemon)


def has_ended(process: int) -> bool:
    """Wait for the end of the process with this pidfd, for a minute at most."""
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    return bool(waiting.poll(60_000))


async def test_an_answer_to_another_row_costs_one_row_and_the_process(tiny_model: Path, tmp_path: Path) -> None:
    """The function writes on the process's line itself: an answer too many, by the number of the row before."""
    source = (
        "import sys\nfrom multiprocessing.connection import Connection\n"
        "def compute_score(solution_str, **row):\n"
        "    if solution_str == 'bad':\n"
        "        line = Connection(int(sys.argv[1]))\n"
        '        line.send_bytes(b\'2 {"scores": [{"score": 9, "acc": 9, "entries": {}}]}\')\n'
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


async def test_a_failed_row_is_reported_while_a_later_one_is_scored(tiny_model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    source = (
        "def compute_score(solution_str, **row):\n"
        f"    open({str(tmp_path / 'never')!r}) if solution_str == 'hangs' else {{}}['nothing']\n"
    )
    async with working(tiny_model, num_workers=2, timeout_s=250, **custom(tmp_path, source)) as worker:
        with pytest.raises(RewardFailed, match=r"row train-000000: .*nothing"):
            await asyncio.wait_for(scores(worker, "fails", "hangs"), 60)


async def test_calls_that_wait_when_the_role_is_closed_get_an_error(tiny_model: Path, tmp_path: Path) -> None:
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
    for outcome in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60):
        assert isinstance(outcome, RewardFailed)
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
        (
            "def compute_score(solution_str, ground_truth): ...\n",
            "should take the keyword arguments data_source, ",
        ),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_start(
    tiny_model: Path, tmp_path: Path, source: str, said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        RewardWorker(job(tiny_model, **custom(tmp_path, source)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_service_however_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    """The function hangs, and is deaf to signals that can be ignored."""
    function = tmp_path / "mine.py"
    function.write_text(
        "import os, signal, time\n"
        "def compute_score(**row):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.fork() == 0: os.setsid()\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    while True: time.sleep(60)\n"
    )
    source = (
        "from rolemesh.config.reward import RewardConfig\n"
        "from rolemesh.services.reward.scoring_pool import CallQueue, ScoringJob, ScoringPool\n"
        f"config = RewardConfig(custom_reward_function={{'path': {str(function)!r}}})\n"
        "queue = CallQueue([ScoringJob([0], [{'solution_str': 'x'}])], str)\n"
        "ScoringPool(config).submit(queue)\n"
        "queue.scores.result()\n"
    )
    service = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    scoring = [os.pidfd_open(int(service.stdout.readline())) for _ in range(2)]
    service.send_signal(number)
    service.wait()
    assert all(map(has_ended, scoring)), "a process that scores outlived its service"


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
