"""Files of a run directory, except checkpoints: config.yaml, metrics.jsonl, dumps, the controller's address."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.config.base import absolute_path
from rolemesh.config.yaml_file import read_yaml
from rolemesh.data.texts import ResponseTexts
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RolemeshError, unreadable
from rolemesh.home import Home, lock
from rolemesh.rpc.term import Term
from rolemesh.services.controller.record import ADDRESS_FILE, ENDED_AT, STEP, Record
from rolemesh.services.controller.run.durably import named, write_durably
from rolemesh.token_mask import token_mask

OTHER_RUN = (
    "is the directory of a running run; wait for its end, or choose another trainer.experiment_name or "
    "default_local_dir"
)


class AnotherRun(RolemeshError):
    """Another process holds the lock of a run directory."""


class MetricsFile:
    """metrics.jsonl: one JSON object per step.

    Lines of steps after `resumed_step` are dropped if these steps will be made again.

    Args:
        path: of the file.
        resumed_step: the step from which the run resumes. With None, a new run, an existing file is kept under
            another name.
        makes_steps: False if the run only validates: what is there then stays as it is.
    """

    def __init__(self, path: Path, resumed_step: int | None, makes_steps: bool = True) -> None:
        if makes_steps and resumed_step is None and path.exists():
            path.rename(path.with_name(f"metrics-until-{time.strftime('%Y%m%dT%H%M%S')}.jsonl"))
        records = read_metrics(path)
        self.records = [r for r in records if not makes_steps or (r[STEP] or 0) <= (resumed_step or 0)]
        write_durably(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> Record:
        """Append a step's record and return it. Values that are not finite become null, as JSON has no NaN."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        record: Record = {STEP: step, **finite, ENDED_AT: time.time()}
        with named(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        self.records.append(record)
        return record

    def close(self) -> None:
        with named(self._path):
            self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Read the records of a metrics.jsonl.

    An incomplete last line, left by a killed process, is skipped, and so are zeros, left by a power failure.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line and "\0" not in line]


@contextmanager
def held(run_dir: Path, otherwise: str = OTHER_RUN, key: str = "trainer.default_local_dir") -> Iterator[None]:
    """Lock a run directory for one run. The lock is released when the process ends, in whatever way.

    Args:
        run_dir: the directory; it is made.
        otherwise: completes the error, after the directory, if another process holds the lock.
        key: of the job file, or option of the command, that chooses another directory.

    Raises:
        AnotherRun: another process holds the lock.
        InvalidConfig: no file can be made in the directory.
        OSError: the same, for a reason that may pass.
        RolemeshError: the file system has no locks.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        opened = (run_dir / ".lock").open("a")
    except OSError as error:
        message = f"{run_dir} cannot be written: {error.strerror}; mend that, or set {key} to another place"
        raise unreadable(InvalidConfig, error, message) from error
    with opened as file:
        try:
            lock(file, run_dir)
        except BlockingIOError:
            raise AnotherRun(f"{run_dir} {otherwise}") from None
        yield


def new_term(run_dir: Path) -> Term:
    """Begin a controller's term with the run: the trained roles that it loads answer nobody else from then on.

    The last number is in <run directory>/term. The new one is larger, and at least the time in microseconds, so
    it is larger even if the directory was deleted while the roles went on.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "term"
    last = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    number = max(int(last) + 1 if last.isdecimal() else 0, time.time_ns() // 1000)
    write_durably(file, f"{number}\n")
    return Term(str(run_dir), number, f"pid {os.getpid()} on {socket.gethostname()}")


def write_config(job: JobConfig) -> None:
    """Write the resolved job to config.yaml, from which the same run can be started again.

    A run that only validates leaves that of the run whose model it validates.
    """
    job.run_dir.mkdir(parents=True, exist_ok=True)
    path = job.run_dir / "config.yaml"
    if not job.trainer.val_only or not path.exists() or _only_validated(path):
        write_durably(path, job.to_yaml())


def _only_validated(config: Path) -> bool:
    """Return whether it is the config.yaml of a run that only validated. False if somebody has broken it."""
    try:
        trainer = read_yaml(config).get("trainer")
    except InvalidConfig:
        return False
    return isinstance(trainer, dict) and bool(trainer.get("val_only"))


@contextmanager
def address_shown(run_dir: Path, address: str, life: str) -> Iterator[None]:
    """Write the controller's address for `rolemesh status` to controller.address.json; delete it on exit.

    If this process is killed, the file stays. Another controller that listens there has another life.
    """
    path = run_dir / ADDRESS_FILE
    run_dir.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps({"address": address, "life": life, "pid": os.getpid()}) + "\n")
    try:
        yield
    finally:
        with suppress(OSError):  # the run's end must not depend on it; `rolemesh status` asks the address
            path.unlink()


async def write_answers(
    batch: DataProto, step: int, texts: ResponseTexts, directory: str | None, num_shown: int = 0
) -> list[dict[str, Any]]:
    """Write a batch, as `answers` shows it, to <directory>/<step>.jsonl, and return the first `num_shown` rows.

    Without a directory only these are decoded. A long row takes some 10 ms, so a thread does all this,
    and the event loop goes on.
    """

    def written_rows() -> list[dict[str, Any]]:
        rows = answers(batch if directory else batch[:num_shown], step, texts)
        dump(rows, directory, step)
        return rows[:num_shown]

    return await asyncio.to_thread(written_rows)


def answers(batch: DataProto, step: int, texts: ResponseTexts) -> list[dict[str, Any]]:
    """Convert rows to readable dicts with input, output, gts (the ground truth), score, acc, uid and others.

    Output is as reward functions see it, and input has special tokens if they do. What is in a column that the
    batch lacks is left out: a page of a plug-in may score its rows by itself.
    Rows that are conversations also have `conversation`: why it ended, numbers, and what each side said.
    """
    columns: dict[str, Sequence[Any]] = {
        "input": texts.whole(_ids(batch["prompts"], batch["prompt_mask"])),
        "output": texts(_ids(batch["responses"], token_mask(batch))),
    }
    if "reward_model" in batch:
        columns["gts"] = [cell.get("ground_truth") for cell in batch["reward_model"]]
    if "token_level_scores" in batch:
        columns["score"] = batch["token_level_scores"].sum(dim=1).tolist()
    if "acc" in batch:
        columns["acc"] = batch["acc"].tolist()
    columns["step"] = [step] * len(batch)
    columns |= {name: batch[name] for name in ("uid", "data_source") if name in batch}
    dumped = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if "turns" in batch:
        for row, answer in enumerate(dumped):
            answer["conversation"] = {**batch["conversation"][row], "said": _said(batch, row, texts.tokenizer)}
    return dumped


def _said(batch: DataProto, row: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Return what each side of a conversation said, in order: who, its tokens' text, and a turn's reward.

    `prompt` is what the policy sees from there on, in place of all before it.
    """
    turns, ids, rewards = (batch[name][row] for name in ("turns", "responses", "environment_rewards"))
    contexts = batch["contexts"][row]
    context = 0
    runs, lengths = turns.unique_consecutive(return_counts=True)
    said: list[dict[str, Any]] = []
    for turn, length in zip(runs.tolist(), lengths.tolist(), strict=True):
        if turn == 0:
            break
        begin = sum(each["tokens"] for each in said)
        own = slice(begin, begin + length)
        text = tokenizer.decode(ids[own], skip_special_tokens=False)
        is_anew = int(contexts[begin]) > context
        context = int(contexts[begin])
        if turn > 0:
            reward = float(rewards[own].sum())
            said.append({"who": "policy", "tokens": length, "text": text, "reward": reward})
        else:
            who = "prompt" if is_anew else "environment"
            said.append({"who": who, "tokens": length, "text": text})
    return said


def dump(rows: list[dict[str, Any]], directory: str | None, step: int) -> None:
    """Write rows to <directory>/<step>.jsonl atomically; do nothing without a directory."""
    if directory:
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        folder = absolute_path(directory)
        name = f"{step}.jsonl"
        with named(folder / name), Home(folder).writing(folder) as into:
            (into / name).write_text("".join(lines), encoding="utf-8")


def _ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row.tolist() for row in torch.split(ids[mask], mask.sum(dim=1).tolist())]
