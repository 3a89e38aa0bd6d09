"""A prompt of any length costs no more than the longest one that fits, and keeps the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parquet_rows import BYTES, LIMIT, dataset, row
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rolemesh.data import PromptDataset
from rolemesh.data.dataset import longest_token
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import CHAT_TEMPLATE

GSM8K = Path(__file__).parents[1] / "fixtures" / "gsm8k" / "train.jsonl"


def ids(data: PromptDataset, index: int = 0) -> list[int]:
    batch = data.batch([index])
    return batch["prompts"][0][batch["prompt_mask"][0]].tolist()


class Counting:
    """A tokenizer that notes how long the longest text was that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.most = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        self.most = max(self.most, *map(len, texts)) if isinstance(texts, list) else max(self.most, len(texts))
        return self._tokenizer(texts, **options)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges: tokens of one to some ten characters, and no unknown text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(GSM8K.read_text().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def test_a_prompt_of_20_mb_is_refused_and_left_out_unread(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row("short"), row("word " * 4_000_000)])
    most = LIMIT * longest_token(BYTES)
    assert longest_token(BYTES) == len("<|endoftext|>")
    tokenizer = Counting(BYTES)
    with pytest.raises(
        InvalidData,
        match=r"row 1: column 'prompt' is 20,000,0\d\d characters, more than 64 tokens can have \(832\), "
        r"data.max_prompt_length is 64; set data.filter_overlong_prompts or data.truncation",
    ):
        dataset(file, tokenizer)
    assert len(dataset(file, tokenizer, filter_overlong_prompts=True)) == 1
    assert len(dataset(file, tokenizer, truncation="left")) == 2
    assert tokenizer.most == most
    dataset(file, tokenizer, truncation="middle")
    assert tokenizer.most == 2 * most


@pytest.mark.parametrize("tokenizer", [BYTES, words_tokenizer()], ids=["bytes", "words"])
@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_a_long_prompt_keeps_the_tokens_the_whole_would_keep(
    tmp_path: Path, truncation: str, tokenizer: Any
) -> None:
    """Truncating the text first changes no token that is kept."""
    text = " ".join(f"{k} apples, {k * k} pears and {k}é" for k in range(4000))
    assert len(text) > 10 * LIMIT * longest_token(tokenizer)
    file = write_rows(tmp_path / "a.parquet", [row(text)])
    messages = [{"role": "user", "content": text}]
    whole = tokenizer(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False),
        add_special_tokens=False,
    )["input_ids"]
    kept = {"left": whole[-LIMIT:], "right": whole[:LIMIT], "middle": whole[:32] + whole[-32:]}[truncation]
    assert ids(dataset(file, tokenizer, truncation=truncation)) == kept


def test_a_prompt_of_exactly_the_maximum_length_is_never_refused(tmp_path: Path) -> None:
    """However long: here each token is the longest that there is."""
    tokenizer = words_tokenizer()
    longest = max(tokenizer.get_vocab(), key=len)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for num_tokens in (LIMIT, LIMIT + 1):
        file = write_rows(tmp_path / "a.parquet", [row(longest * num_tokens)])
        assert len(tokenizer(longest * num_tokens)["input_ids"]) == num_tokens
        if num_tokens == LIMIT:
            assert len(ids(dataset(file, tokenizer))) == LIMIT
        else:
            with pytest.raises(InvalidData, match="more than 64 tokens can have"):
                dataset(file, tokenizer)


def test_a_long_prompt_that_is_few_tokens_is_not_refused(tmp_path: Path) -> None:
    """A tokenizer of whole words has one token for an unknown one, however long."""
    words = Tokenizer(models.WordLevel({"user": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<unk>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file = write_rows(tmp_path / "a.parquet", [row("x" * 100_000 + " user")])
    assert ids(dataset(file, tokenizer)) == [1, 0]
