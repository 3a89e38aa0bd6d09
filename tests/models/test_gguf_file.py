"""A GGUF file becomes a model directory with the numbers that transformers reads from it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from in_process_commands import rolemesh
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rolemesh.errors import ModelNotFound
from rolemesh.models.gguf_file import convert_gguf
from rolemesh.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer

WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 128
IDS = torch.arange(40)[None] * 6


def write_gguf(
    file: Path, kind: str = "Q4_1", architecture: str = "llama", template: str = CHAT_TEMPLATE
) -> Path:
    """Write a small random Llama with a byte-level tokenizer, its matrices in blocks of a quantised type."""
    vocab = byte_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "Ġ+"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["Ġ +"])
    writer.add_bos_token_id(vocab["<|endoftext|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    if template:
        writer.add_chat_template(template)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (WIDTH, INNER)
    into = gguf.GGMLQuantizationType[kind]
    for name, shape in shapes.items():
        values = random.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, into), raw_dtype=into)
    for name in ("output_norm", *(f"blk.{n}.{norm}_norm" for n in range(LAYERS) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F32"])
def test_the_directory_has_the_logits_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", kind)
    done = convert_gguf(file, tmp_path / "model")
    read = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path, **read))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), expected)
    assert expected.std() > 0
    matrices = 7 * LAYERS + 1
    assert done.quantizations == ({kind: matrices} if kind != "F32" else {})
    assert (done.architecture, done.has_template) == ("LlamaForCausalLM", True)
    norms = (2 * LAYERS + 1) * WIDTH
    assert done.num_parameters == 260 * WIDTH + LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER) + norms
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.tokenize("17 +5") == ["1", "7", "Ġ+", "5"]
    assert tokenizer.decode(tokenizer("17 + 5 = 22")["input_ids"]) == "17 + 5 = 22"


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model")
    write_gguf(tmp_path / "other.gguf", architecture="unheard-of")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    for name in ("absent", "text", "other", "cut"):
        with pytest.raises(ModelNotFound, match=rf"{name}\.gguf") as refused:
            convert_gguf(tmp_path / f"{name}.gguf", tmp_path / "model")
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "model").exists()


def test_the_command_says_what_it_undid_and_what_is_missing(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", template="")
    said = rolemesh("model", tmp_path / "model", "--from-gguf", file)
    assert said.returncode == 0, said.stderr
    assert "LlamaForCausalLM, 98,880 parameters in float32" in said.stdout
    assert "Quantisation undone: Q4_1 (15 tensors)." in said.stdout
    assert "It has no chat template" in said.stdout
    again = rolemesh("model", tmp_path / "model", "--from-gguf", file)
    assert (again.returncode, "exists; name a new directory" in again.stderr) == (2, True)
    both = rolemesh("model", tmp_path / "other", "--from-gguf", file, "--num-layers", "3")
    assert (both.returncode, "leave out the options of a random one" in both.stderr) == (2, True)
