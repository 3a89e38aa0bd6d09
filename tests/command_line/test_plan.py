"""`rolemesh plan` as people use it, and a job that is too large for its machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process_commands import rolemesh
from transformers import LlamaConfig

from rolemesh.config import load_job
from rolemesh.models.tiny import byte_tokenizer, make_tiny_model
from rolemesh.services.command_line.arithmetic import write_arithmetic

ROOT = Path(__file__).parents[2]
STRATEGIES = {"collocate", "hybrid", "split-collocate", "standalone"}


@pytest.fixture(scope="module")
def job_7b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file whose models have Llama-2-7B's shape: config.json, and a weights file of the right size, of
    which only the header is written."""
    directory = tmp_path_factory.mktemp("7b")
    config = LlamaConfig(tie_word_embeddings=False)
    config.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    train, _ = write_arithmetic(directory / "data")
    block = {f"self_attn.{name}_proj": [4096, 4096] for name in "qkvo"}
    block |= {"mlp.gate_proj": [11008, 4096], "mlp.up_proj": [11008, 4096], "mlp.down_proj": [4096, 11008]}
    block |= {"input_layernorm": [4096], "post_attention_layernorm": [4096]}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(32) for name, shape in block.items()}
    shapes |= {"model.embed_tokens.weight": [32000, 4096], "lm_head.weight": [32000, 4096]}
    shapes |= {"model.norm.weight": [4096]}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    half = {"dtype": "bfloat16"}
    job = {
        "algorithm": {"use_kl_in_reward": True},
        "data": {"train_batch_size": 512, "train_files": str(train)},
        "actor": {"model": {"path": str(directory), **half}},
        "reference": {"model": half},
        "critic": {"model": half},
        "rollout": {"name": "vllm", "gpu_memory_utilization": 0.8, **half},
        "trainer": {"device": "cpu", "default_local_dir": str(directory / "run")},
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_the_demo_fits_on_this_machine_in_every_strategy(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    answer = rolemesh("plan", ROOT / "configs" / "tiny.yaml", f"actor.model.path={model}")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("  fits  ") == len(STRATEGIES)
    for word in (*STRATEGIES, "weights", "gradients", "optimizer", "activations", "KV cache", "update"):
        assert word in answer.stdout


def test_json_has_every_part_in_bytes_and_the_best_first(job_7b: Path) -> None:
    answer = rolemesh("plan", job_7b, "--gpus", 8, "--gpu-memory", "180GiB", "--json")
    assert answer.returncode == 0, answer.stderr
    plans: list[dict[str, Any]] = json.loads(answer.stdout)
    assert {plan["strategy"] for plan in plans} == STRATEGIES
    assert all(plan["fits"] and plan["verdict"] == "fits" for plan in plans)
    seconds = [plan["seconds_per_step"] for plan in plans]
    assert seconds == sorted(seconds)
    alone = next(plan for plan in plans if plan["strategy"] == "standalone")
    groups = {group["name"]: group for group in alone["groups"]}
    assert sum(group["devices"] for group in groups.values()) <= 8
    ranks = groups["actor"]["devices"]  # more than one only because they make the step shorter
    assert groups["actor"]["roles"]["actor"]["optimizer"] == 8 * 6_738_415_616 // ranks
    in_float32 = 32_000 * 4096 + 65 * 4096  # of the reference: its embedding and its norms
    assert groups["reference"]["roles"]["reference"]["weights"] == 2 * 6_738_415_616 + 2 * in_float32
    assert groups["rollout"]["roles"]["rollout"]["weights"] == 2 * 6_738_415_616


def test_a_role_larger_than_one_gpu_is_planned_with_ranks(job_7b: Path, tmp_path: Path) -> None:
    """108 GB of the actor's state want two GPUs of 80 GiB."""
    on_80 = ("plan", job_7b, "--gpus", 8, "--gpu-memory", "80GiB")
    answer = rolemesh(*on_80, "--json")
    assert answer.returncode == 0
    plans = {plan["strategy"]: plan for plan in json.loads(answer.stdout)}
    assert {name: plan["verdict"] for name, plan in plans.items()} == {
        "standalone": "fits",
        "split-collocate": "fits",
        "hybrid": "fits",
        "collocate": "fits",
    }
    actor = next(group for group in plans["standalone"]["groups"] if group["name"] == "actor")
    assert actor["devices"] >= 2
    assert actor["roles"]["actor"]["optimizer"] == 8 * 6_738_415_616 // actor["devices"]
    assert any("ranks, each with its share" in note for note in plans["standalone"]["notes"])
    assert any("and an engine of its own" in note for note in plans["hybrid"]["notes"])
    searched = rolemesh(*on_80, "--search")
    assert searched.returncode == 0
    printed = yaml.safe_load(searched.stdout[searched.stdout.index("placement:") :])
    (tmp_path / "placement.yaml").write_text(yaml.safe_dump(printed))
    job = load_job(job_7b, [str(tmp_path / "placement.yaml")])
    assert any(job.plan[group].ranks > 1 for group in job.plan.grouping)


def test_a_plan_without_a_fit_says_by_how_much_and_exits_with_1(job_7b: Path) -> None:
    answer = rolemesh("plan", job_7b, "--gpus", 2, "--gpu-memory", "24 GB")
    assert answer.returncode == 1
    assert answer.stdout.count("does not fit") == len(STRATEGIES)
    assert "misses" in answer.stdout
    assert "2 more GPUs are needed" in answer.stdout  # standalone: four groups with a model


def test_the_search_prints_a_placement_that_a_job_takes(job_7b: Path, tmp_path: Path) -> None:
    """Its own grouping where that is better than every strategy, and otherwise the strategy's name."""
    cases = ((1, "sync", "collocate"), (8, "sync", "collocate"), (8, "async", "custom"))
    for gpus, mode, strategy in cases:
        override = f"rollout.mode={mode}"
        answer = rolemesh("plan", job_7b, override, "--gpus", gpus, "--gpu", "b200", "--search")
        assert answer.returncode == 0, answer.stderr
        assert "…" not in answer.stdout  # 80 columns hold every number
        assert ("found by search" in answer.stdout) == (strategy == "custom")
        _, _, text = answer.stdout.partition("for the job file:")
        placed = yaml.safe_load(job_7b.read_text()) | yaml.safe_load(text)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(placed))
        job = load_job(tmp_path / "job.yaml", [override])
        assert job.placement.strategy == strategy
        assert max(group.ranks for group in job.plan.groups) > 1 or gpus == 1
        assert sorted(role for roles in job.plan.grouping.values() for role in roles) == sorted(job.roles)


def test_the_printed_placement_keeps_the_launcher_and_replicas(job_7b: Path) -> None:
    own = ("placement.launcher=ray", "placement.replicas.reward=3", "placement.strategy=standalone")
    on_8 = ("plan", job_7b, *own, "--gpus", 8, "--gpu-memory", "80GiB", "--search")
    _, _, text = rolemesh(*on_8).stdout.partition("for the job file:")
    plans = json.loads(rolemesh(*on_8, "--json").stdout)
    assert yaml.safe_load(text) == {"placement": plans[0]["placement"]}
    for plan in plans:
        placement, groups = plan["placement"], {group["name"]: group for group in plan["groups"]}
        assert placement["launcher"] == "ray"
        alone = any(group["roles"].keys() == {"reward"} for group in plan["groups"])
        assert placement.get("replicas", {}).get("reward", 0) == (3 if alone else 0)
        ranks = {name: group["ranks"] for name, group in groups.items() if group["ranks"] > 1}
        assert placement.get("ranks", {}) == ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "8", "--gpu-memory", "80"), "80GiB"),
        (("--gpus", "8", "--gpu", "voodoo2"), "h100"),
        (("actor.model.path=nowhere",), "nowhere"),
    ],
)
def test_errors_are_one_line(job_7b: Path, arguments: tuple[str, ...], words: str) -> None:
    answer = rolemesh("plan", job_7b, *arguments)
    assert answer.returncode in (1, 2)
    (line,) = answer.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_job_that_cannot_fit_is_refused_before_any_process(job_7b: Path) -> None:
    """Each role alone: 16 bytes a parameter of actor and critic, 4 of the rollout, about 2 of the reference."""
    answer = rolemesh("run", job_7b, "rollout.name=hf", "rollout.gpu_memory_utilization=0.5")
    assert answer.returncode == 2, answer.stdout + answer.stderr
    assert "at least 237 GiB" in answer.stderr
    assert "actor's optimizer, 50.2 GiB" in answer.stderr
    assert "collocate needs at least 100 GiB" in answer.stderr
    assert not (job_7b.parent / "run" / "logs").exists()
