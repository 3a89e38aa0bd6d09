"""The files of a run directory besides checkpoints: config.yaml, metrics.jsonl, dumps of responses, and the
controller's address while it runs."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RolemeshError
from rolemesh.home import Home
from rolemesh.services.controller.record import ADDRESS_FILE, ENDED_AT, STEP, Record
from rolemesh.services.controller.run.checkpoints import write_durably


class MetricsFile:
    """metrics.jsonl: an object a step. What it holds is what happened: lines of steps after `resumed_step`,
    which will be made again, are dropped.

    Args:
        path: of the file.
        resumed_step: the step that the run goes on from; 0 for a new run, whose predecessor's file is kept
            under another name.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        if resumed_step == 0 and path.exists():
            path.rename(path.with_name(f"metrics-until-{time.strftime('%Y%m%dT%H%M%S')}.jsonl"))
        self.records = [r for r in read_metrics(path) if (r[STEP] or 0) <= resumed_step]
        write_durably(path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> Record:
        """Appends a step's record and hands it back. A value that is not finite is null: JSON has no other."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        record: Record = {STEP: step, **finite, ENDED_AT: time.time()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.records.append(record)
        return record

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; a last line that a killed process left unfinished is passed over."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Keeps a run directory to one run; a process that ends, however it does, lets it go.

    Raises:
        RolemeshError: another run has it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RolemeshError(
                f"{run_dir} is the directory of a run that still goes on; wait for its end, or choose another "
                "trainer.experiment_name or default_local_dir"
            ) from None
        yield


def write_config(job: JobConfig) -> None:
    """config.yaml: the resolved job, which starts the same run again."""
    job.run_dir.mkdir(parents=True, exist_ok=True)
    write_durably(job.run_dir / "config.yaml", job.to_yaml())


@contextmanager
def address_shown(run_dir: Path, address: str) -> Iterator[None]:
    """While it is entered, controller.address.json tells `rolemesh status` where the controller is."""
    path = run_dir / ADDRESS_FILE
    run_dir.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps({"address": address, "pid": os.getpid()}) + "\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def answers(batch: DataProto, step: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows of a batch for people: input, output, gts (the ground truth), score, acc, uid and so on."""
    scores = batch["token_level_scores"].sum(dim=1).tolist()
    rows = zip(
        _texts(batch["prompts"], batch["prompt_mask"], tokenizer),
        _texts(batch["responses"], batch["response_mask"], tokenizer),
        batch["reward_model"],
        scores,
        batch["acc"].tolist(),
        batch["uid"],
        batch["data_source"],
        strict=True,
    )
    return [
        {
            "input": prompt,
            "output": response,
            "gts": reward_model.get("ground_truth"),
            "score": score,
            "acc": acc,
            "step": step,
            "uid": uid,
            "data_source": source,
        }
        for prompt, response, reward_model, score, acc, uid, source in rows
    ]


def dump(rows: list[dict[str, Any]], directory: str | None, step: int) -> None:
    """Writes <directory>/<step>.jsonl, whole or not at all; no directory, no dump."""
    if directory:
        lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        with Home(Path(directory)).writing(Path(directory)) as into:
            (into / f"{step}.jsonl").write_text("".join(lines), encoding="utf-8")


def _texts(ids: Any, mask: Any, tokenizer: Any) -> list[str]:
    tokens = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts
