"""The columns of batches. rolemesh/methods.py says which method reads and writes which.

Axes: B rows, P prompt tokens (left-padded), T response tokens (right-padded), S = P + T, K tokens that could be
drawn, C parts of the reward, V the vocabulary. P and T are data.max_prompt_length and data.max_response_length
in every batch: a fixed width keeps a row's bits independent of its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Column:
    """A column. It means the same in every method.

    Args:
        axes: one letter for each axis.
        dtype: of a tensor; None for a column of Python objects. Floats must be finite. In columns [B, T] this
            holds where response_mask is True, as no method reads the other cells of most columns.
        meaning: for people.
        values: the valid range, as least value and first value beyond it, each a number or the size of an axis;
            None for any.
        cells: the type of each cell, for a column without dtype.
        entries: the types of values in a cell's dict, by key, with OTHER for every other key. float also takes
            an int in float32's range. Empty for anything.
        zero_elsewhere: of a float column [B, T] whose rows are summed: 0 where response_mask is False.
    """

    axes: str
    dtype: torch.dtype | None
    meaning: str
    values: tuple[int, int | str] | None = None
    cells: type = dict
    entries: Mapping[str, type[str] | type[float]] = field(default_factory=dict)
    zero_elsewhere: bool = False


OTHER = "*"
# padding has a token's id too
TOKEN_IDS = (0, "V")
ZERO_OR_ONE = (0, 2)

COLUMNS: dict[str, Column] = {
    # from the data set
    "prompts": Column("BP", torch.int64, "prompt token ids, left-padded", TOKEN_IDS),
    "prompt_mask": Column("BP", torch.bool, "True on prompt tokens"),
    "uid": Column("B", None, "str: the prompt, the same for all its responses", cells=str),
    "seeds": Column("B", torch.int64, "the row's own random stream"),
    "data_source": Column("B", None, "str: picks the reward function", cells=str),
    "reward_model": Column("B", None, "dict: style and ground_truth"),
    "extra_info": Column("B", None, "dict: further entries of the data set"),
    "agent_name": Column("B", None, "str: who answers the policy's turns", cells=str),
    "messages": Column("B", None, "list: the prompt as messages", cells=list),
    # from the rollout
    "row": Column("B", torch.int64, "which row of the request this is"),
    "responses": Column("BT", torch.int64, "response token ids, right-padded, with the end token", TOKEN_IDS),
    "response_mask": Column("BT", torch.bool, "True on tokens that the policy sampled"),
    "rollout_log_probs": Column("BT", torch.float32, "the engine's, of the distribution it sampled from"),
    "weight_versions": Column(
        "BT", torch.int64, "by which weights the token was made; -1 where none was", (-1, 1 << 63)
    ),
    "kept_ids": Column(
        "BTK",
        torch.int32,
        "what could be drawn, where rollout.top_k and top_p cut some off; -1 beyond",
        values=(-1, "V"),
    ),
    "response_texts": Column(
        "B", None, "str: the responses, where text is scored and not token ids", cells=str
    ),
    # of conversations
    "turns": Column(
        "BT",
        torch.int64,
        "k on tokens that the policy sampled in its k-th turn (k >= 1), -(k+1) on those that were added after "
        "it (-1: before the first turn), 0 beyond the end",
    ),
    "contexts": Column(
        "BT",
        torch.int64,
        "0 on tokens that go on from the prompt, c on those of the c-th prompt that took its place",
        (0, "T"),
    ),
    "environment_rewards": Column("BT", torch.float32, "the environment's, at the last tokens of turns"),
    "conversation": Column(
        "B", None, "dict: why it ended, and numbers about it", entries={"why": str, OTHER: float}
    ),
    # prompts and responses together
    "input_ids": Column("BS", torch.int64, "prompts and responses", TOKEN_IDS),
    "attention_mask": Column("BS", torch.int64, "1 on prompt and response tokens", ZERO_OR_ONE),
    "position_ids": Column("BS", torch.int64, "0 at the first token of a prompt", (0, "S")),
    # experience
    "old_log_probs": Column("BT", torch.float32, "the actor's, before the update"),
    "entropys": Column("BT", torch.float32, "of the actor's distribution, in nats"),
    "sum_pi_squared": Column("BT", torch.float32, "the squared probabilities of all tokens, summed"),
    "ref_log_probs": Column("BT", torch.float32, "the reference policy's"),
    "values": Column("BT", torch.float32, "the critic's value before token t is sampled"),
    "token_level_scores": Column(
        "BT",
        torch.float32,
        "the reward, as a rule on the last response token; 0 on all that the policy did not sample",
        zero_elsewhere=True,
    ),
    "acc": Column("B", torch.float32, "1 where the answer is right (the score itself where none says)"),
    "reward_components": Column("BC", torch.float32, "the parts of the reward, by algorithm.gdpo_reward_keys"),
    "reward_extra_info": Column(
        "B",
        None,
        "dict: numbers other than the score, by name; pred: the answer found",
        entries={"pred": str, OTHER: float},
    ),
    "think_mask": Column("BT", torch.bool, "True between <think> and </think>; all of a response without them"),
    # made by the controller
    "reward_baselines": Column("B", torch.float32, "the reward of the greedy answer to the row's prompt"),
    "token_level_rewards": Column("BT", torch.float32, "scores less the KL penalty"),
    "rollout_is_weights": Column("BT", torch.float32, "of the token's loss: old over rollout probability"),
    "loss_mask": Column("BT", torch.bool, "response_mask without what the rollout correction rejects"),
    "advantages": Column("BT", torch.float32, "how much better than expected the token's outcome is"),
    "returns": Column("BT", torch.float32, "the discounted rewards from here on: the critic's target"),
}
