"""What becomes of the keys of section rollout with the engine vllm."""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig
from vllm_rollouts import EOS, P, T, installed, job_of, make_plain_model, model_with_ends

from rolemesh.config.job import make_job
from rolemesh.config.rollout import RolloutConfig, own_rows
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_causal_lm, load_outline, load_tokenizer
from rolemesh.models.tiny import make_tiny_model
from rolemesh.planner.device_specs import GPUS
from rolemesh.services.command_line import app
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.vllm import engine_args, owner, reload

pytestmark = pytest.mark.timeout(900)  # a process imports vLLM, on cores that other tests use too


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_ends(tmp_path_factory.mktemp("qwen2"), "qwen2")


def test_every_key_of_the_section_has_its_place():
    places = [engine_args.ENGINE, engine_args.ENGINE_DERIVED, engine_args.SAMPLING, engine_args.ELSEWHERE]
    keys = [key for place in places for key in place]
    assert sorted(keys) == sorted(RolloutConfig.model_fields)


def test_vllms_float32_is_not_tf32_nor_its_sampler_flashinfers():
    """Measured on an H200: 0.01 nats of a log-probability, which Triton's default costs."""
    on_gpu = engine_args.environment_of(torch.device("cuda"), {})
    assert (on_gpu["TRITON_F32_DEFAULT"], on_gpu["VLLM_USE_FLASHINFER_SAMPLER"]) == ("ieee", "0")


def test_vllm_logs_warnings_and_more_if_the_job_or_the_user_asks(monkeypatch: pytest.MonkeyPatch):
    asked = engine_args.environment_of(torch.device("cuda"), {}, logs=True)
    assert asked.items() - engine_args.environment_of(torch.device("cuda"), {}).items() == {
        (owner.LEVEL, "INFO")
    }
    assert owner.LEVEL not in engine_args.environment_of(
        torch.device("cuda"), {owner.LEVEL: "ERROR"}, logs=True
    )
    logger = logging.getLogger("vllm")
    before = logger.level
    try:
        for value, level in ((None, logging.WARNING), ("info", logging.INFO)):
            if value:
                monkeypatch.setenv(owner.LEVEL, value)
            owner.Handler()
            assert logger.level == level
    finally:
        logger.setLevel(before)
    assert "level" not in json.loads(owner.LOGGING.read_text())["loggers"]["vllm"]


@pytest.mark.parametrize(
    ("strategy", "gpu", "keys", "expected"),
    [
        ("standalone", "h100", {}, (1024, 0.9)),
        ("standalone", "a100", {}, (256, 0.9)),
        ("standalone", "l40s", {}, (256, 0.9)),
        ("standalone", "", {}, (256, 0.5)),  # a CPU
        ("hybrid", "h100", {}, (256, 0.5)),
        ("standalone", "h100", {"max_num_seqs": 8, "gpu_memory_utilization": 0.3}, (8, 0.3)),
        ("hybrid", "h100", {"max_num_seqs": 8, "gpu_memory_utilization": 0.3}, (8, 0.3)),
    ],
)
def test_an_engine_with_a_gpu_of_its_own_takes_most_of_it(
    strategy: str, gpu: str, keys: dict[str, Any], expected: tuple[int, float], monkeypatch: pytest.MonkeyPatch
):
    if gpu:
        found = SimpleNamespace(total_memory=GPUS[gpu].memory_bytes, name=GPUS[gpu].name)
        monkeypatch.setattr(engine_args, "resolve_device", lambda _: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    sections = {"trainer": {"device": "cpu"}, "placement": {"strategy": strategy}}
    rollout = engine_args.with_rows_and_share(
        make_job({"rollout": {"name": "vllm", **keys}} | sections)
    ).rollout
    assert (rollout.max_num_seqs, rollout.gpu_memory_utilization) == expected


@installed
def test_an_engine_with_its_own_gpu_has_vllms_default_rows(monkeypatch: pytest.MonkeyPatch):
    with engine_args.restored_environment():
        engine_args.prepare_environment(torch.device("cpu"))
        arg_utils = importlib.import_module("vllm.engine.arg_utils")
        usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    for gpu in GPUS.values():
        platform = SimpleNamespace(
            get_device_total_memory=lambda gpu=gpu: gpu.memory_bytes,
            get_device_name=lambda gpu=gpu: gpu.name,
            is_tpu=lambda: False,
            is_cpu=lambda: False,
        )
        monkeypatch.setattr(arg_utils, "current_platform", platform)
        _, rows = arg_utils.EngineArgs.get_batch_defaults(1)
        assert own_rows(gpu.memory_bytes, gpu.name) == rows[usage], gpu.name


def test_vllm_on_a_cpu_has_its_own_process_only_if_bound():
    """The user binds it to cores."""
    cpu, bind, own = torch.device("cpu"), "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"
    alone = engine_args.environment_of(cpu, {})
    assert (alone[bind], alone[own]) == ("nobind", "0")
    assert not {bind, own} & engine_args.environment_of(cpu, {bind: "0-3"}).keys()
    assert engine_args.environment_of(cpu, {own: "1"}).keys() == alone.keys() - {own}
    assert not {bind, own} & engine_args.environment_of(torch.device("cuda"), {}).keys()


@installed
def test_the_keys_reach_vllm(model_directory: Path):
    keys = {
        "max_num_seqs": 9,
        "gpu_memory_utilization": 0.3,
        "max_num_batched_tokens": 77,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "tensor_model_parallel_size": 2,
        "dtype": "bfloat16",
    }
    job = job_of(model_directory, **keys, stop=["7"], top_k=5, top_p=0.5, ignore_eos=True)

    outline = load_outline(job.actor.model, "rollout")
    with engine_args.restored_environment():
        engine_args.prepare_environment(torch.device("cpu"))
        given = engine_args.engine_arguments(job, outline)
        wide = job.model_copy(update={"actor": job.actor.model_copy(update={"head_dtype": "float32"})})
        with_overrides = engine_args.engine_arguments(wide, outline)
    assert with_overrides == given | {"hf_overrides": {"head_dtype": "float32"}}
    assert {
        ours: given[theirs] for ours, theirs in engine_args.ENGINE.items()
    } == keys  # prompts whole, on a CPU
    assert given["max_model_len"] == P + T
    assert given["max_logprobs"] == 5
    assert not given["skip_tokenizer_init"]  # stop is text
    asked = engine_args.sampling_arguments(job, job.rollout, [1, 2])
    assert (asked["top_k"], asked["top_p"], asked["stop"], asked["logprobs"]) == (5, 0.5, ["7"], 5)
    assert asked["ignore_eos"]
    assert not asked["skip_special_tokens"]  # a text of stop may be one
    assert asked["stop_token_ids"] == []
    greedy = engine_args.sampling_arguments(job, job.rollout.val_kwargs, [1, 2])
    assert greedy["temperature"] == greedy["logprobs"] == 0


@installed
def test_a_text_that_ends_a_response_may_be_a_special_token(model_directory: Path):
    """As vLLM's own detokenizer finds it."""
    job = job_of(model_directory, stop=["<|im_start|>"])
    with engine_args.restored_environment():
        engine_args.prepare_environment(torch.device("cpu"))
        params = importlib.import_module("vllm.sampling_params").SamplingParams
        request = importlib.import_module("vllm.v1.engine").EngineCoreRequest
        detokenizer = importlib.import_module("vllm.v1.engine.detokenizer").IncrementalDetokenizer
    asked = request(
        request_id="0",
        prompt_token_ids=[65],
        mm_features=None,
        sampling_params=params(**engine_args.sampling_arguments(job, job.rollout, [EOS])),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    tokenizer = load_tokenizer(job.actor.model)
    found = detokenizer.from_new_request(tokenizer, asked)
    assert found.update([66, 67], False) is None
    assert found.update([tokenizer.convert_tokens_to_ids("<|im_start|>")], False) == "<|im_start|>"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"agent": {"default_agent_loop": "tool_agent"}},
            r"default_agent_loop is tool_agent, which converses, but rollout.multi_turn.enable is false",
        ),
        ({"calculate_log_probs": False}, "calculate_log_probs is false"),
        ({"prompt_length": P + 1}, rf"rollout.prompt_length is {P + 1}, but data.max_prompt_length is {P}"),
        (
            {"response_length": T + 1},
            rf"rollout.response_length is {T + 1}, but data.max_response_length is {T}",
        ),
        ({"load_format": "dummy"}, "load_format.*safetensors"),
        ({"name": "hf", "tensor_model_parallel_size": 2}, "is a key of engine vllm, but rollout.name is hf"),
        ({"temperature": 0.001}, r"rollout.temperature is 0.001, but engine vllm raises it to 0.01"),
        ({"name": "hf", "stop": ["x"]}, "is a key of engine vllm, but rollout.name is hf"),
    ],
)
def test_keys_that_cannot_be_followed_are_refused_with_reason(rollout: dict[str, Any], message: str):
    with pytest.raises(InvalidConfig, match=message):
        job_of(Path("model"), **rollout)


def test_a_temperature_that_vllm_would_raise_is_refused():
    """Unless nothing is sampled at it."""
    job = {"rollout": {"name": "vllm", "val_kwargs": {"do_sample": True, "temperature": 0.009}}}
    said = r"rollout.val_kwargs.temperature is 0.009, but engine vllm raises it to 0.01"
    with pytest.raises(InvalidConfig, match=said):
        make_job(job | {"data": {"val_files": ["a"]}})
    assert make_job(job)  # it validates nothing
    assert make_job({"algorithm": {"page": "sft"}, "rollout": {"name": "vllm", "temperature": 0.001}})


def test_keys_of_other_job_files_that_ask_for_nothing_are_taken():
    assert job_of(Path("model"), multi_turn={"enable": False}, prompt_length=P, response_length=T)


def test_low_temperatures_are_taken_where_they_stay_as_they_are():
    greedy = {"do_sample": True, "temperature": 0}
    for rollout in ({"name": "hf", "temperature": 0.001}, {"temperature": 0.01}, {"val_kwargs": greedy}):
        assert job_of(Path("model"), **rollout)


@installed
def test_a_top_k_above_the_vocabulary_is_refused_at_start(model_directory: Path):
    with pytest.raises(InvalidConfig, match=r"rollout.top_k is 300, but the model has 259 tokens"):
        load_engine(job_of(model_directory, top_k=300), None)


@installed
def test_vllms_environment_does_not_reach_later_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    before = dict(os.environ)
    with engine_args.restored_environment():
        engine_args.prepare_environment(torch.device("cpu"))
        assert os.environ[owner.VARIABLE] == str(os.getpid())
        assert "LOCAL_RANK" not in os.environ
        assert os.environ["HF_HUB_OFFLINE"] == "0", "a setting of the user's stays"
        os.environ["LD_PRELOAD"] = "libexample.so"  # vLLM sets such variables
    assert os.environ == before


@installed
def test_heads_that_vllm_cannot_compute_are_refused_at_start(tmp_path: Path):
    make_tiny_model(tmp_path, num_heads=4)
    with pytest.raises(InvalidConfig, match="16 wide"):
        load_engine(job_of(tmp_path), None)


@installed
@pytest.mark.parametrize("hidden_size", [32, 64, 96, 128, 256, 1024])
def test_the_command_model_makes_one_whose_heads_vllm_computes(tmp_path: Path, hidden_size: int):
    """By default, of width 64, and of others. What the other tests load is the default, with larger weights."""
    app.model(tmp_path, hidden_size=hidden_size, num_layers=1)
    job = job_of(tmp_path)
    with engine_args.restored_environment():
        engine_args.prepare_environment(torch.device("cpu"))
        given = engine_args.engine_arguments(job, load_outline(job.actor.model, "rollout"))
    assert given["model"] == str(tmp_path)


@pytest.mark.parametrize("hidden_size", [20, 64, 66, 112])
def test_a_model_of_every_even_width_computes(tmp_path: Path, hidden_size: int):
    """Rotary embeddings turn pairs of numbers: 112 / 4 is even, but too narrow for vLLM, and 112 / 3 is odd."""
    app.model(tmp_path, hidden_size=hidden_size, num_layers=1)
    model = load_causal_lm(job_of(tmp_path).actor.model, "actor")
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@installed
def test_experts_that_vllm_would_update_wrongly_are_refused(tmp_path: Path):
    make_plain_model(tmp_path, Qwen3MoeConfig, is_tied=True)
    with pytest.raises(
        InvalidConfig, match=r"mixture of experts \(model.layers.0.mlp.experts.*set rollout.name"
    ):
        load_engine(job_of(tmp_path), None)


@installed
@pytest.mark.parametrize(
    ("file", "ours", "changed"),
    [
        ("v1/worker/gpu_worker.py", "def reload_weights", "def renew_weights"),
        ("v1/worker/gpu_model_runner.py", "weights_iterator", "iterator"),
        (f"{reload.RELOAD}/types.py", "load_numel", "num_loaded"),
    ],
)
def test_a_vllm_that_takes_weights_otherwise_is_refused_at_start(
    file: str, ours: str, changed: str, tmp_path: Path
):
    own = Path(str(importlib.util.find_spec("vllm").origin)).parent
    for each, _, _ in reload.PRIVATE:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(own / each, tmp_path / each)
    reload.check_reload(tmp_path, "0.0")
    (tmp_path / file).write_text((own / file).read_text().replace(ours, changed))
    with pytest.raises(InvalidConfig, match=rf"vLLM 0.0 has no .* in {file}"):
        reload.check_reload(tmp_path, "0.0")


def test_choosing_vllm_without_it_says_what_to_install(tiny_model: Path):
    """In a process whose interpreter has no module of that name."""
    program = f"""
        import sys
        from pathlib import Path
        sys.modules["vllm"] = None
        from vllm_rollouts import job_of
        from rolemesh.services.rollout.engines import load_engine
        load_engine(job_of(Path({str(tiny_model)!r})), None)
    """
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support" / "engines"), str(Path(__file__).parents[2])]
    )
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "InvalidConfig: rollout.name is vllm" in ended.stderr
    assert "install `rolemesh[vllm]` for a GPU" in ended.stderr
