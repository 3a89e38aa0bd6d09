"""Shapes of models, memory and time of roles: the planner's formulas by hand."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import COLLOCATE, H100, LLAMA_7B, MODELLED, STANDALONE, planner, ppo
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolemesh.checks.device_memory import least_memory, least_on_gpu
from rolemesh.config.model import ModelConfig
from rolemesh.errors import InvalidConfig, ModelNotFound
from rolemesh.models.heads import ScoreModel
from rolemesh.models.loading import model_directory
from rolemesh.planner.activations import gathered_bytes
from rolemesh.planner.cost import ForwardPass, role_seconds
from rolemesh.planner.device_specs import GIB, Device, available_memory, cpu, human_size, parse_size
from rolemesh.planner.memory import kv_bytes_per_token, logits_bytes, role_memory, scoring_bytes
from rolemesh.planner.search import search
from rolemesh.planner.shapes import ModelShape, read_shape
from rolemesh.ranks.sharded_files import TensorFiles

# -------------------------------------------------------------------------------------- shapes


def test_a_config_alone_gives_llama_7b(tmp_path: Path) -> None:
    LlamaConfig(tie_word_embeddings=False).save_pretrained(tmp_path)  # its defaults are the 7B's
    shape = read_shape(ModelConfig(path=str(tmp_path)), "actor")
    assert replace(shape, matrices=()) == LLAMA_7B
    # Rows plus columns: four of the attention's and three of the MLP's in each of 32 layers.
    assert sum(size for _, size in shape.matrices) == 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert LLAMA_7B.policy_parameters == 6_738_415_616


def test_parameters_are_counted_exactly_with_and_without_weights(any_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(any_model)
    (tmp_path / "config.json").write_text((any_model / "config.json").read_text())
    for directory in (any_model, tmp_path):
        config = ModelConfig(path=str(directory))
        shape = read_shape(config, "actor")
        assert shape.policy_parameters == sum(p.numel() for p in model.parameters())  # tied ones once
        linears = [m for name, m in model.named_modules() if hasattr(m, "in_features") and name != "lm_head"]
        assert shape.multiplied_parameters == sum(m.weight.numel() for m in linears)
    critic = ScoreModel.load(ModelConfig(path=str(any_model)), "critic")
    assert shape.score_parameters == sum(p.numel() for p in critic.parameters())


def test_duplicate_weights_in_another_file_are_not_counted(two_layers: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(two_layers, tmp_path / "model")
    expected = read_shape(ModelConfig(path=str(directory)), "actor")
    weights = load_file(directory / "model.safetensors")
    save_file(
        {f"other.{name}": tensor for name, tensor in weights.items()}, directory / "consolidated.safetensors"
    )
    assert read_shape(ModelConfig(path=str(directory)), "actor") == expected


def test_a_token_is_multiplied_by_the_experts_it_is_routed_to(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64}
    config = Qwen3MoeConfig(vocab_size=300, head_dim=16, **sizes, **experts)
    model = Qwen3MoeForCausalLM(config)
    config.save_pretrained(tmp_path)
    shape = read_shape(ModelConfig(path=str(tmp_path)), "actor")
    assert shape.policy_parameters == sum(p.numel() for p in model.parameters())
    attention, router, routed = 4 * 32 * 32, 8 * 32, 2 * 3 * 32 * 16
    assert shape.multiplied_parameters == 2 * (attention + router + routed)
    assert shape.intermediate == 32
    # The others are gathered with their block, and are not outside of the blocks.
    block = attention + router + 4 * routed
    outside = shape.policy_parameters - 2 * block
    assert outside == 2 * 300 * 32 + 2 * (2 * 32 + 2 * 16) + 32
    assert gathered_bytes(shape.policy_parameters, shape, "bfloat16") == 2 * 2 * block + 4 * outside


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": 8}'])
def test_a_directory_that_describes_no_model_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotFound, match="critic"):
        read_shape(ModelConfig(path=str(tmp_path)), "critic")


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"a": ' * 50_000 + "1" + "}" * 50_000,
        '{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
        '{"a": {"dtype": 32, "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": null}',
        "{",
        "\ufeff{}",
    ],
    ids=lambda header: header[:50],
)
def test_a_malformed_weights_header_is_a_one_line_error(tiny_model: Path, tmp_path: Path, header: str) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(4))
    with pytest.raises(ModelNotFound, match=f"{file} cannot be read: ") as planned:
        read_shape(ModelConfig(path=str(tmp_path)), "actor")
    assert len(str(planned.value).splitlines()) == 1
    with pytest.raises(ModelNotFound, match=f"{file} cannot be read: "):
        TensorFiles.of_model(tmp_path)


def test_a_missing_model_error_is_that_of_its_loader(tmp_path: Path) -> None:
    """It names what makes the model, too."""
    (tmp_path / "empty").mkdir()
    for name in ("", "absent", "empty"):
        config = ModelConfig(path=name and str(tmp_path / name))
        with pytest.raises(ModelNotFound) as planned:
            read_shape(config, "actor")
        with pytest.raises(ModelNotFound) as loaded:
            model_directory(config, "actor")
        assert str(planned.value) == str(loaded.value)
        assert ("`rolemesh model" in str(planned.value)) == (name == "absent")


# ---------------------------------------------------------------------------------------- sizes


def test_sizes_are_read_as_people_write_them() -> None:
    assert parse_size("80GiB") == 80 * 2**30
    assert parse_size("24 GB") == 24 * 10**9
    assert parse_size(" 1.5tib ") == 3 * 2**39
    assert parse_size("512B") == 512
    for wrong in ("80", "GiB", "-1GiB", "0GiB", "80 gigs", "1e3GB", ""):
        with pytest.raises(InvalidConfig, match="80GiB"):
            parse_size(wrong)


def test_sizes_are_written_with_three_digits() -> None:
    sizes = {0: "0 B", 1023: "1.0 KiB", 5 * 2**20: "5.0 MiB", 800 * 2**20: "800 MiB", 80 * GIB: "80.0 GiB"}
    assert {size: human_size(size) for size in sizes} == sizes


def test_available_memory_is_some_of_the_machine() -> None:
    assert 2**26 < available_memory() < 2**50


# --------------------------------------------------------------------------------------- memory


def test_a_trained_parameter_takes_16_bytes_and_a_fixed_one_2() -> None:
    job, shapes = ppo(), dict.fromkeys(MODELLED, LLAMA_7B)
    actor = role_memory(job, "actor", shapes, H100)
    assert (actor.weights, actor.gradients, actor.optimizer) == (26_953_662_464, 26_953_662_464, 53_907_324_928)
    norms = 32 * 2 * 4096 + 4096  # stay float32
    assert role_memory(job, "reference", shapes, H100).weights == 13_476_831_232 + 2 * norms
    stored = dict.fromkeys(MODELLED, replace(LLAMA_7B, stored="float32"))  # so does the embedding
    assert role_memory(job, "reference", stored, H100).weights == 13_476_831_232 + 2 * (norms + 131_072_000)
    tied = dict.fromkeys(MODELLED, replace(LLAMA_7B, stored="float32", head_parameters=0))
    assert role_memory(job, "reference", tied, H100) == role_memory(job, "reference", stored, H100)  # a copy
    spread = role_memory(job, "reference", shapes, H100, ranks=2)  # outside of the blocks all does
    assert spread.weights == (13_476_831_232 + 2 * (norms + 2 * 131_072_000)) // 2
    plain = ppo(reference={"model": {"dtype": "float32"}})
    assert role_memory(plain, "reference", shapes, H100).weights == 26_953_662_464
    critic = role_memory(job, "critic", shapes, H100)
    assert critic.weights == 4 * (6_607_343_616 + 4097)
    halved = role_memory(job, "actor", shapes, H100, ranks=2)
    assert (halved.weights, halved.gradients, halved.optimizer) == (
        actor.weights // 2,
        actor.gradients // 2,
        actor.optimizer // 2,
    )
    assert role_memory(job, "reward", shapes, H100).total == 0


def test_a_llama_7b_token_has_half_a_mebibyte_of_kv_cache() -> None:
    assert kv_bytes_per_token(LLAMA_7B, "bfloat16") == 2 * 32 * 32 * 128 * 2 == 2**19
    assert kv_bytes_per_token(replace(LLAMA_7B, kv_heads=8), "float32") == 2**18


def test_the_hf_cache_has_full_width_for_every_decoded_row() -> None:
    job = ppo(rollout={"max_num_seqs": 64})
    memory = role_memory(job, "rollout", {"rollout": LLAMA_7B}, H100)
    assert memory.kv_cache == 64 * 1024 * 2**19 == 32 * GIB
    assert memory.weights == 4 * 6_738_415_616


def test_hf_keeps_turns_of_conversations_beside_its_cache() -> None:
    conversations = {"max_num_seqs": 64, "multi_turn": {"enable": True}}
    memory = role_memory(ppo(rollout=conversations), "rollout", {"rollout": LLAMA_7B}, H100)
    assert memory.kv_cache == (64 + 64) * 1024 * 2**19 == 64 * GIB  # rows that are decoded, rows that are kept
    few = ppo(rollout=conversations, data={"train_batch_size": 8}, actor={"ppo_mini_batch_size": 8})
    assert role_memory(few, "rollout", {"rollout": LLAMA_7B}, H100).kv_cache == (8 + 8) * 1024 * 2**19
    vllm = [
        ppo(rollout={"name": "vllm", "multi_turn": {"enable": enable}}) for enable in (False, True)
    ]  # which keeps turns in the one cache that it has
    assert len({role_memory(job, "rollout", {"rollout": LLAMA_7B}, H100).kv_cache for job in vllm}) == 1


def test_vllm_takes_its_share_of_the_device() -> None:
    job = ppo(rollout={"name": "vllm", "gpu_memory_utilization": 0.75})
    memory = role_memory(job, "rollout", {"rollout": LLAMA_7B}, H100)
    assert memory.weights == 2 * 6_738_415_616
    assert memory.total == (60 - 1 - 2) * GIB  # its context and its graphs are in the share, too
    eager = ppo(rollout={"name": "vllm", "gpu_memory_utilization": 0.75, "enforce_eager": True})
    assert role_memory(eager, "rollout", {"rollout": LLAMA_7B}, H100).total == (60 - 1) * GIB
    small = replace(H100, memory_bytes=16 * GIB)
    assert role_memory(job, "rollout", {"rollout": LLAMA_7B}, small).kv_cache == 1024 * 2**19  # one sequence
    machine = role_memory(job, "rollout", {"rollout": LLAMA_7B}, cpu(2048 * GIB))
    assert machine.weights == 2 * 2 * 6_738_415_616  # the fetched version too
    assert machine.kv_cache == 256 * 1024 * 2**19  # of a CPU's memory no more than max_num_seqs rows fill


def test_activations_are_stored_blocks_plus_the_largest_extra() -> None:
    # 8 rows of 1,024 tokens. A block's input in float32, 32 times; and the last norm:
    inputs, last = 32 * 8192 * 4096 * 4, 8192 * 4096 * (4 + 4 + 2)
    norms, attention, mlp = 2 * 4096 * (4 + 4 + 2), 4 * 4096 * 2, 4 * 11008 * 2
    block = 8192 * (norms + attention + mlp)
    logits = 4 * 8 * 513 * 32000 * 4  # of all tokens at once: a chunk may have 2**28 logits, 8,388 tokens'
    casts, of_head = 2 * 6_476_005_376, 2 * 131_072_000
    forward = 8192 * (3 * 4096 * 4 + 3 * 11008 * 2)
    checkpointed = role_memory(ppo(), "actor", {"actor": LLAMA_7B}, H100)
    assert logits_bytes(ppo(), "actor", LLAMA_7B, H100, copies=4) == logits
    small = replace(H100, memory_bytes=4 * GIB)  # 2**24 logits, at 16 bytes a sixteenth
    assert logits_bytes(ppo(), "actor", LLAMA_7B, small, copies=4) == 4 * 524 * 32000 * 4
    # On a CPU a chunk has 2**25 logits, 1,048 tokens', or up to twice as many.
    assert logits_bytes(ppo(), "actor", LLAMA_7B, cpu(64 * GIB), copies=4) == 4 * 2 * 1048 * 32000 * 4
    assert checkpointed.activations == inputs + last + of_head + forward + casts
    offload = ppo(actor={"model": {"enable_activation_offload": True}})
    offloaded = role_memory(offload, "actor", {"actor": LLAMA_7B}, H100).activations
    assert checkpointed.activations - offloaded == inputs * 30 // 32
    # In float32 there are no casts, and a block that is recomputed and its gradients are the most.
    plain = role_memory(ppo(actor={"model": {"dtype": "float32"}}), "actor", {"actor": LLAMA_7B}, H100)
    in_float32 = 8192 * 4 * (2 * 4096 * 3 + 4 * 4096 + 4 * 11008)
    assert plain.activations == inputs + 8192 * 4096 * 3 * 4 + 2 * in_float32
    whole = role_memory(
        ppo(actor={"model": {"enable_gradient_checkpointing": False}}), "actor", {"actor": LLAMA_7B}, H100
    )
    assert whole.activations == 32 * block + last + casts + of_head + logits
    # A CPU's allocator reuses little, so there all are added up; one published version is in weights.
    on_cpu = role_memory(ppo(), "actor", {"actor": LLAMA_7B}, cpu(64 * GIB))
    assert on_cpu.activations == inputs + 2 * block + 4 * 2 * 1048 * 32000 * 4 + casts + of_head
    few = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 10**6, "ppo_mini_batch_size": 8}
    of_a_step = ppo(actor=few, data={"train_batch_size": 8})  # 8 rows in all
    assert role_memory(of_a_step, "actor", {"actor": LLAMA_7B}, H100) == checkpointed
    dynamic = ppo(actor={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 8192})
    assert role_memory(dynamic, "actor", {"actor": LLAMA_7B}, H100) == checkpointed
    assert role_memory(dynamic, "critic", {"critic": LLAMA_7B}, H100).activations > checkpointed.activations


@pytest.mark.parametrize(("memory_gib", "tokens"), [(80, 4104), (4, 1048)])
def test_log_probs_take_the_largest_logits_block_the_gpu_allows(memory_gib: int, tokens: int) -> None:
    """Of 8 rows 8 · 513 tokens are predicted. In 4 GiB a block has 2**25 logits, at 8 bytes a sixteenth."""
    gpu = replace(H100, memory_bytes=memory_gib * GIB)
    block = 8192 * (3 * 4096 * 4 + 3 * 11008 * 2)
    reference = role_memory(ppo(), "reference", {"reference": LLAMA_7B}, gpu)
    assert reference.activations == max(block, 8 * tokens * 32000 + 8192 * 4096 * (4 + 4 + 2))
    # The actor scores without gradients. Of a small model with a large vocabulary this may be the peak.
    small = replace(LLAMA_7B, layers=2, multiplied_parameters=10**6, body_parameters=10**6, vocabulary=10**6)
    trained = role_memory(ppo(), "actor", {"actor": small}, gpu)
    scoring = scoring_bytes(ppo(), "actor", small, 8192, gpu, ranks=1)
    assert trained.activations + trained.gradients >= scoring


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, 4096) for _ in range(4))),
    rows=st.integers(1, 64),
    lengths=st.tuples(st.integers(1, 4096), st.integers(1, 4096)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    engine=st.sampled_from(["hf", "vllm"]),
    checkpointing=st.booleans(),
    ranks=st.integers(1, 9),
    memory=st.integers(1, 2**40),
)
def test_no_part_is_negative_and_more_ranks_need_no_more_state(
    sizes: tuple[int, int, int, int],
    rows: int,
    lengths: tuple[int, int],
    dtype: str,
    engine: str,
    checkpointing: bool,
    ranks: int,
    memory: int,
) -> None:
    hidden, layers, head_dim, vocabulary = sizes
    shape = ModelShape(
        hidden * vocabulary + layers, 0, layers, hidden, layers, 2, 1, head_dim, hidden, vocabulary
    )
    model = {"dtype": dtype, "enable_gradient_checkpointing": checkpointing}
    job = ppo(
        data={"max_prompt_length": lengths[0], "max_response_length": lengths[1], "train_batch_size": rows},
        actor={"model": model, "ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": rows},
        critic={"model": model, "ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": rows},
        rollout={"name": engine, "dtype": dtype},
    )
    device = replace(H100, memory_bytes=memory)
    for role in MODELLED:
        parts = role_memory(job, role, {role: shape}, device).parts()
        assert min(parts.values()) >= 0
        assert sum(least_memory(job, role, {role: shape}).parts().values()) <= sum(parts.values())
        assert least_on_gpu(job, role, {role: shape}).total <= sum(parts.values())
        sharded = role_memory(job, role, {role: shape}, device, ranks).parts()
        assert all(sharded[part] <= parts[part] for part in ("weights", "gradients", "optimizer", "kv_cache"))
        assert all(seconds > 0 for seconds in role_seconds(job, role, {role: shape}, device, ranks).values())


# ----------------------------------------------------------------------------------------- cost


def test_flops_are_two_per_weight_and_four_per_token_pair() -> None:
    """Two for each weight and token, and four for each pair of tokens."""
    forward = ForwardPass(LLAMA_7B, rows=2, width=1024, predicted=513, dtype="bfloat16")
    matrices = 2 * 6_476_005_376 * 1024
    attention = 32 * 2 * (2 * 1024 * 1024 * 4096)  # QKᵀ and the product with V
    head = 2 * 4096 * 32000 * 513
    assert forward.flops == 2 * (matrices + attention + head)


def test_decoding_few_rows_takes_as_long_as_reading_the_weights() -> None:
    exact = Device("ideal", 80 * GIB, {"bfloat16": 1e18}, 1e12, 1e12, 1e12, 1e12, block_s=0.0)
    job = ppo(
        data={"train_batch_size": 4, "max_prompt_length": 1, "max_response_length": 100},
        actor={"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4},
        critic={"ppo_micro_batch_size_per_gpu": 4},
        rollout={"name": "vllm", "gpu_memory_utilization": 0.9},
    )
    seconds = role_seconds(job, "rollout", {"rollout": LLAMA_7B}, exact)["generate"]
    reading = 100 * 2 * (6_476_005_376 + 131_072_000) / 1e12
    assert reading < seconds < 1.05 * reading


def test_two_devices_halve_what_is_computed() -> None:
    job, shapes = ppo(), {"reference": LLAMA_7B}
    one, two = (role_seconds(job, "reference", shapes, H100, n)["score"] for n in (1, 2))
    assert two == pytest.approx(one / 2)


def test_remax_answers_every_prompt_once_more() -> None:
    greedy = {"algorithm": {"adv_estimator": "remax"}, "rollout": {"n": 3}}
    remax, four = ppo(**greedy), ppo(rollout={"n": 4})
    of_remax, of_four = (
        [role_seconds(job, role, {role: LLAMA_7B}, H100) for role in ("rollout", "reward")]
        for job in (remax, four)
    )
    assert of_remax == of_four
    learnt_from = role_seconds(remax, "reference", {"reference": LLAMA_7B}, H100)
    assert learnt_from == role_seconds(ppo(rollout={"n": 3}), "reference", {"reference": LLAMA_7B}, H100)


def test_switches_move_what_leaves_and_what_enters() -> None:
    plan = planner(gpus=1).plan("policy", {"a": ("actor", "rollout"), "b": ("critic",), "c": ("reference",)})
    group = next(g for g in plan.groups if g.name == "a")
    # rollout -> actor -> (updates, no switch) -> rollout: each leaves once and enters once
    moved = 2 * (4 + 4 + 8) * 6_738_415_616
    assert group.switching(H100) == pytest.approx(moved / H100.host_bandwidth)
    assert all(g.switching(H100) == 0 for g in plan.groups if len(g.roles) == 1)


def test_a_scoring_role_moves_no_moments_and_offloads_no_copy() -> None:
    """Its weights are moved in, and on a GPU nothing is copied when it leaves."""
    [group] = planner(gpus=1).plan("collocate", COLLOCATE).groups
    policy, score = LLAMA_7B.policy_parameters, LLAMA_7B.score_parameters
    # rollout, actor, reference, critic (scores and learns, as the rules need no device), actor (learns)
    moved = 2 * 4 * policy + 4 * policy + group.memory["reference"].weights + (12 + 12) * (score + policy)
    assert group.switching(H100) == pytest.approx(moved / H100.host_bandwidth)
    # On a CPU all that came leaves again.
    everything = 2 * (2 * 4 * policy + group.memory["reference"].weights + 12 * (score + policy))
    assert group.switching(replace(H100, shared=True)) == pytest.approx(everything / H100.host_bandwidth)


def test_groups_work_in_parallel_and_their_roles_in_turn() -> None:
    alone = planner(gpus=4).plan("standalone", STANDALONE)
    updates = [role_seconds(ppo(), role, dict.fromkeys(MODELLED, LLAMA_7B), H100)["update"] for role in
               ("actor", "critic")]  # fmt: skip
    assert alone.phases["update"] == max(updates)
    together = planner(gpus=1).plan("collocate", COLLOCATE)
    assert together.phases["update"] == sum(updates)
    on_cpu = planner(gpus=1, device=cpu(GIB)).plan("standalone", STANDALONE)
    assert on_cpu.phases["update"] == pytest.approx(sum(g.busy("update") for g in on_cpu.groups))


def test_a_rollout_of_its_own_may_run_ahead() -> None:
    ahead = planner(rollout={"mode": "async"})
    in_step = planner()
    assert ahead.plan("standalone", STANDALONE).seconds < in_step.plan("standalone", STANDALONE).seconds
    assert "rollout.mode async" in ahead.plan("collocate", COLLOCATE).blocked
    assert next(len(group.roles) for group in search(ahead).groups if "rollout" in group.roles) == 1
