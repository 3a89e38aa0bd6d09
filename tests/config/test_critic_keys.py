"""Keys of the critic that follow the actor's."""

import pytest
import yaml

from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig

FOLLOWED = {
    "ppo_epochs": 3,
    "shuffle": True,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "loss_scale_factor": 7,
}


def test_keys_that_a_critic_leaves_out_follow_the_actor() -> None:
    """The resolved file has them."""
    job = make_job({"actor": FOLLOWED})
    assert yaml.safe_load(job.to_yaml())["critic"].items() >= FOLLOWED.items()
    assert (
        make_job({}).critic.model_dump().items()
        >= {
            "ppo_epochs": 1,
            "shuffle": False,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
        }.items()
    )


def test_keys_that_a_critic_sets_do_not_follow_the_actor() -> None:
    own = {"ppo_epochs": 2, "shuffle": False, "loss_agg_mode": "token-sum", "loss_scale_factor": 5}
    job = make_job({"actor": FOLLOWED, "critic": own})
    assert job.critic.model_dump().items() >= own.items()
    assert job.actor.model_dump().items() >= FOLLOWED.items()


def test_an_actors_wrong_value_is_not_reported_for_the_critic() -> None:
    with pytest.raises(InvalidConfig) as error:
        make_job({"actor": {"ppo_epochs": 0}})
    assert "actor.ppo_epochs" in str(error.value)
    assert "critic" not in str(error.value)
