"""The job file: what it refuses, and with which words."""

import re
from contextlib import nullcontext
from functools import reduce
from pathlib import Path

import pytest
import yaml

from rolemesh.catalog.agents import AGENTS, AgentSpec
from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.config import load_job, parse_overrides
from rolemesh.config.base import leaves
from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import InvalidConfig

CHART = Path(__file__).parents[2] / "charts" / "rlhf-job"
SMALL = {"data": {"train_batch_size": 8}, "actor": {"ppo_mini_batch_size": 8}}


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ({"actor": {"clip_ration": 0.2}}, "did you mean 'actor.clip_ratio'"),
        ({"actor": {"optim": {"learning_rate": 1}}}, "known here: lr,"),
        ({"trainer": {"lr": 1}}, "did you mean 'actor.optim.lr'"),
        ({"algoritm": {}}, "did you mean 'algorithm'"),
        ({"actor_rollout_ref": {"actor": {}}}, "top-level sections actor, rollout and reference"),
        ({"rollout": {"val_kwargs": {"temprature": 1}}}, "did you mean 'rollout.val_kwargs.temperature'"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(section: dict, hint: str) -> None:
    with pytest.raises(InvalidConfig, match="unknown key") as error:
        make_job(section)
    assert hint in str(error.value)


def test_every_misspelt_leaf_is_refused_and_led_back() -> None:
    for key in leaves(JobConfig):
        wrong = parse_overrides([f"{key}x=1"])
        with pytest.raises(InvalidConfig, match="unknown key") as error:
            make_job(wrong)
        assert f"{key}x" in str(error.value)
        assert f"did you mean {key!r}" in str(error.value)


def test_a_wrong_type_names_key_value_and_expectation() -> None:
    with pytest.raises(InvalidConfig, match=r"'data.train_batch_size' is 'many': .*valid number"):
        make_job({"data": {"train_batch_size": "many"}})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"algorithm": {"adv_estimator": "reinforce++"}},
            ["gae, grpo,", "did you mean 'reinforce_plus_plus'?"],
        ),
        ({"actor": {"loss_agg_mode": "token_mean"}}, ["token-sum", "did you mean 'token-mean'?"]),
        ({"actor": {"policy_loss": {"loss_mode": "gsop"}}}, ["vanilla, gpg,", "did you mean 'gspo'?"]),
        (
            {"algorithm": {"rollout_correction": {"rollout_is": "tokens"}}},
            ["token, sequence; did you mean 'token'"],
        ),
        (
            {"trainer": {"logger": ["file", "wandbi"]}},
            ["'trainer.logger.1' is 'wandbi'", "did you mean 'wandb'?"],
        ),
        ({"rollout": {"mode": "yes"}}, ["'rollout.mode' is 'yes', which is none of sync, async"]),
        ({"rollout": {"mode": None}}, ["'rollout.mode' is None, which is none of sync, async"]),
    ],
)
def test_an_unknown_value_names_the_known_ones_and_the_nearest(section: dict, words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as error:
        make_job(section)
    assert all(word in str(error.value) for word in words), error.value


WRONG_KINDS = {
    "reward.custom_reward_function.reward_kwargs={w: [1, 2]}": (
        "'reward.custom_reward_function.reward_kwargs.w' is [1, 2]: Input should be a valid string or a valid "
        "integer or a valid number or a valid boolean"
    ),
    "algorithm.rollout_correction.rollout_is_threshold=null": (
        "'algorithm.rollout_correction.rollout_is_threshold' is None: Input should be a valid number or "
        "a valid string"
    ),
    "actor.model.target_modules={a: 1}": (
        "'actor.model.target_modules' is {'a': 1}: Input should be a valid string or a valid list"
    ),
    "actor.model.target_modules=[a, 1]": (
        "'actor.model.target_modules' is ['a', 1]: Input should be a valid string; "
        "'actor.model.target_modules.1' is 1: Input should be a valid string"
    ),
    "rollout.stop=x": "'rollout.stop' is 'x': Input should be a valid list",
    "rollout=": "'rollout' is None: Input should be a valid section",
    "actor.optim.betas=[0.9]": "'actor.optim.betas' is [0.9], which has too few values",
    "actor.optim.betas=[0.9, 0.9, 0.9]": (
        "'actor.optim.betas' is [0.9, 0.9, 0.9]: List should have at most 2 items after validation, not 3"
    ),
}


@pytest.mark.parametrize("override", WRONG_KINDS)
def test_a_value_of_a_wrong_kind_names_keys_and_valid_kinds(
    override: str,
) -> None:
    with pytest.raises(InvalidConfig) as error:
        make_job(parse_overrides([override]))
    assert str(error.value) == f"job: {WRONG_KINDS[override]}"


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("actor: {clip_ratio: -7}\ndata: {seeed: 1}\n")
    with pytest.raises(InvalidConfig) as error:
        load_job(path)
    assert all(word in str(error.value) for word in (str(path), "actor.clip_ratio", "data.seeed", "data.seed"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "got a list"),
        ("a: [", "line 1: while parsing"),
        ("actor: 3", "'actor' is 3"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(content)
    with pytest.raises(InvalidConfig, match=r"job\.yaml") as error:
        load_job(path)
    assert words in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no such job file: .*absent.yaml"):
        load_job(tmp_path / "absent.yaml")
    (tmp_path / "job.yaml").touch()
    with pytest.raises(InvalidConfig, match=r"no such job file: .*absent.yaml"):
        load_job(tmp_path / "job.yaml", [str(tmp_path / "absent.yaml")])


def test_files_overlay_from_left_to_right_and_keys_after_all(tmp_path: Path) -> None:
    clip_ratios = {"base": (0.1, 0.1, 0.1, 0.1), "first": (0.2, 0.2, 0.2), "second": (0.3, 0.3)}
    names = ("clip_ratio_c", "clip_ratio_high", "clip_ratio_low", "clip_ratio")
    for name, values in clip_ratios.items():
        section = {key: 1 + value for key, value in zip(names[::-1], values, strict=False)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"actor": section}))
    files = [str(tmp_path / f"{name}.yaml") for name in ("first", "second")]
    overrides = ["actor.clip_ratio=1.4", *files, "actor.policy_loss.loss_mode=cispo"]
    actor = load_job(tmp_path / "base.yaml", overrides).actor
    assert [getattr(actor, name) for name in names] == [1.1, 1.2, 1.3, 1.4]


def test_an_override_that_is_neither_a_key_nor_a_file_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"'dapo' is not of the form section.key=value, nor a .yaml file"):
        parse_overrides(["dapo"])


# Text that other systems replace.
UNREPLACED = (
    (
        "a/${trainer.project_name}/x.py",
        "a job file has no interpolation, so ${trainer.project_name} would stay as",
    ),
    (
        "$HOME/x.py",
        "environment variables are not replaced, so $HOME would stay as it is; write its value there",
    ),
)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train_batch_size=10", "actor.ppo_mini_batch_size=4"], "10 does not divide into mini-batches"),
        (["actor.ppo_micro_batch_size_per_gpu=3"], "do not divide into micro-batches"),
        (
            ["critic.ppo_micro_batch_size_per_gpu=3"],
            "critic.ppo_mini_batch_size is 8, so a mini-batch has 8 rows",
        ),
        (["algorithm.adv_estimator=grpo"], "rollout.n is 1"),
        (["trainer.resume_mode=resume_path"], "resume_from_path is not set"),
        (["rollout.top_k=0"], "-1 for all tokens"),
        (["rollout.name=openai"], "set rollout.openai.urls to the servers"),
        (
            ["rollout.val_kwargs={n: 8, temperature: 0.7}"],
            "temperature is 0.7, but do_sample is false, the default of validation, so answers are greedy",
        ),
        (["rollout.val_kwargs.temperature=1"], "temperature is 1, but do_sample is false"),
        (["rollout.val_kwargs={do_sample: false, top_k: 5}"], "top_k is 5, but do_sample is false"),
        (["rollout.val_kwargs={temperature: 0, top_p: 0.5}"], "top_p is 0.5, but do_sample is false"),
        (
            ["rollout.val_kwargs.n=8", "data.val_files=v.parquet"],
            "rollout.val_kwargs.do_sample is false (its default there), so all answers",
        ),
        (
            ["rollout.val_kwargs={n: 8, do_sample: true, temperature: 0}", "data.val_files=v.parquet"],
            "rollout.val_kwargs.temperature is 0",
        ),
        (
            ["rollout.val_kwargs={n: 8, do_sample: true, top_k: 1}", "data.val_files=v.parquet"],
            "rollout.val_kwargs.top_k is 1, so all answers",
        ),
        (["rollout={n: 2, do_sample: false}"], "rollout.do_sample is false, so all answers"),
        (["data.apply_chat_template_kwargs.tools=[]"], "has tools, which is no variable of a chat template"),
        *((["plugins=" + text], words) for text, words in UNREPLACED),
        *((["trainer.default_local_dir=" + text], words) for text, words in UNREPLACED),
        (["rollout.agent.external.command=[run, '${oc.env:HOME}/x']"], "so ${oc.env:HOME} would stay as it is"),
        (
            ["trainer.default_local_dir=~nobody-here/a"],
            "there is no such user; write ./~ if the name begins with ~",
        ),
        (
            ["data.apply_chat_template_kwargs={'${a}': 1}"],
            "'the key data.apply_chat_template_kwargs.${a}' is '${a}': a job file has no interpolation, so "
            r"${a} would stay as it is; write its value there, or \${a} if this text is meant",
        ),
        (
            ["data.max_length=1024"],
            "data.max_length is 1024, but page ppo answers prompts; set algorithm.page to sft",
        ),
        (
            ["trainer={default_local_dir: '', experiment_name: ../../x}"],
            "is the run directory; use a name that does not begin with ~ or /",
        ),
        (["actor.optim.betas=[1.5, 0]"], "'actor.optim.betas.0' is 1.5: Input should be less than 1"),
        (
            ["critic.optim.betas=[0.9, -1]"],
            "'critic.optim.betas.1' is -1: Input should be greater than or equal to 0",
        ),
        (["trainer.experiment_name=$USER"], "so $USER would stay as it is"),
        *(
            (
                [f"trainer.experiment_name={name}"],
                "is the run directory; use a name that does not begin with ~ or /",
            )
            for name in ("~/a", "'~'", "/a", "../a", "a/../../b", "a/", "''")
        ),
    ],
)
def test_sections_that_disagree_are_refused_at_start(tmp_path: Path, overrides: list[str], words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    with pytest.raises(InvalidConfig) as error:
        load_job(path, overrides)
    assert words in str(error.value)


def test_a_template_variable_no_job_file_can_hold_is_refused() -> None:
    """It is a variable of the chat template."""
    with pytest.raises(
        InvalidConfig, match=r"apply_chat_template_kwargs: a is \{1: 2\}, .* back as \{'1': 2\}"
    ):
        make_job({"data": {"apply_chat_template_kwargs": {"a": {1: 2}}}})


def test_resolved_files_and_several_sampled_answers_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(make_job({}).to_yaml())  # says temperature 1 beside do_sample: false
    load_job(tmp_path / "config.yaml")
    make_job({"rollout": {"val_kwargs": {"n": 8, "do_sample": True, "temperature": 0.7}}})


@pytest.mark.parametrize(
    ("also", "differ"),
    [
        ([], False),
        (["data.val_files=[]"], True),  # nothing is validated
        (["trainer.val_before_train=false"], True),
        (["trainer.val_before_train=false", "trainer.test_freq=5"], False),
        (["trainer.val_before_train=false", "trainer.val_only=true"], False),
        (["algorithm.page=sft"], True),  # no prompt is answered
        (["rollout.multi_turn.enable=true"], False),  # no tool and no user
        (["rollout.multi_turn={enable: true, tools: [calculator]}"], False),
        (["rollout.multi_turn={enable: true, tools: [calculator, python]}"], True),  # may draw numbers
        (["rollout.multi_turn={enable: true, interaction_config_path: i.yaml}"], True),
        (["rollout.multi_turn={enable: true, mcp_servers: {a: {command: [b]}}}"], True),
        (["rollout.multi_turn.enable=true", "rollout.agent.external.command=[a]"], True),
        (["rollout.multi_turn={interaction_config_path: i.yaml}"], False),  # not enabled
    ],
)
def test_several_greedy_answers_are_refused_if_surely_equal(
    also: list[str], differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of a plug-in may say anything; those of other tests are put aside."""
    built_in = {name: agent for name, agent in AGENTS.items() if agent.origin == BUILT_IN}
    monkeypatch.setattr(AGENTS, "_declared", built_in)
    job = parse_overrides(["data.val_files=v.parquet", "rollout.val_kwargs.n=8", *also])
    if differ:
        make_job(job)
    else:
        with pytest.raises(InvalidConfig, match="so all answers to a prompt are the same"):
            make_job(job)
        own = AgentSpec(name="own", code=lambda job: None, origin="tests")
        monkeypatch.setitem(built_in, "own", own)
        job["rollout"]["multi_turn"] = {"enable": True}
        make_job(job)


FILTER = ["algorithm.filter_groups.enable=true", "trainer.total_training_steps=2"]


@pytest.mark.parametrize(
    ("multi_turn", "differ"),
    [("{}", False), ("{enable: true, tools: [calculator]}", False), ("{enable: true, tools: [python]}", True)],
)
@pytest.mark.parametrize("learner", [FILTER, []])
def test_greedy_answers_may_differ_if_the_environment_varies(
    learner: list[str], multi_turn: str, differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then what learns from different answers takes them."""
    built_in = {name: agent for name, agent in AGENTS.items() if agent.origin == BUILT_IN}
    monkeypatch.setattr(AGENTS, "_declared", built_in)
    greedy = ["algorithm.adv_estimator=grpo", "rollout.n=2", "rollout.do_sample=false"]
    job = parse_overrides([*greedy, *learner, f"rollout.multi_turn={multi_turn}"])
    with nullcontext() if differ else pytest.raises(InvalidConfig, match="needs answers that differ; set"):
        make_job(job)


def test_every_key_of_a_path_expands_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other text: a stop text may begin with ~."""
    monkeypatch.setenv("HOME", "/home/ann")
    paths = [key for key in leaves(JobConfig) if re.search(r"(^|_|\.)(path|dir|files)$", key)]
    assert len(paths) == 15
    for key in paths:
        # Some need another key beside them.
        servers = ["rollout.name=openai", "rollout.openai.urls=[http://a:1]"]
        beside = {
            "rollout.openai.weights_dir": servers,
            "actor.model.lora_adapter_path": ["actor.model.lora_rank=8"],
        }
        job = make_job(parse_overrides([f"{key}=~/a/~b", *beside.get(key, [])]))
        value = reduce(getattr, key.split("."), job)
        assert value in ("/home/ann/a/~b", ["/home/ann/a/~b"]), key
    named = make_job(parse_overrides(["trainer.experiment_name=~/a", "trainer.default_local_dir=a"]))
    assert named.trainer.experiment_name == "~/a"


def test_plugins_expand_the_home_directory_before_their_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("")
    assert make_job({"plugins": "~/mine.py"}).plugins == [str(tmp_path / "mine.py")]


def test_a_critic_free_job_does_not_check_the_critic() -> None:
    job = make_job(
        {
            **SMALL,
            "algorithm": {"adv_estimator": "grpo"},
            "rollout": {"n": 2},
            "critic": {"ppo_micro_batch_size_per_gpu": 3},
        }
    )
    assert job.roles == ("actor", "rollout", "reward")


def test_roles_follow_from_the_algorithm() -> None:
    assert make_job(SMALL).roles == ("actor", "rollout", "critic", "reward")
    with_kl = make_job({**SMALL, "algorithm": {"use_kl_in_reward": True}})
    assert with_kl.roles == ("actor", "rollout", "reference", "critic", "reward")


def test_the_length_of_whole_rows_is_changed_by_one_key(tmp_path: Path) -> None:
    """The resolved file leaves out the two lengths that follow from it, and keeps others."""
    sft = {"algorithm": {"page": "sft"}}
    (tmp_path / "config.yaml").write_text(make_job({**sft, "data": {"max_length": 2048}}).to_yaml())
    for overrides, response in ([], 2047), (["data.max_length=4096"], 4095):
        data = load_job(tmp_path / "config.yaml", overrides).data
        assert (data.max_prompt_length, data.max_response_length) == (1, response)
    own = {"max_length": 100, "max_prompt_length": 60, "max_response_length": 40}
    (tmp_path / "config.yaml").write_text(make_job({**sft, "data": own}).to_yaml())
    assert load_job(tmp_path / "config.yaml").data.max_prompt_length == 60
    two = ["algorithm.page=sft", "data.max_prompt_length=512", "data.max_response_length=512"]
    words = r"together 1024; take these two out of the job file, or set them to 1 and 4095"
    with pytest.raises(InvalidConfig, match=words):
        make_job(parse_overrides([*two, "data.max_length=4096"]))
    three = ["data.max_length=4096", "data.max_prompt_length=1", "data.max_response_length=4095"]
    assert make_job(parse_overrides([*two, *three])).data.max_response_length == 4095


@pytest.mark.parametrize("text", ["2000", "2000.0", "2e3"])
def test_max_length_is_a_whole_number_in_each_spelling(text: str) -> None:
    data = make_job(parse_overrides(["algorithm.page=sft", f"data.max_length={text}"])).data
    assert (data.max_length, data.max_prompt_length, data.max_response_length) == (2000, 1, 1999)


def test_overrides_are_yaml_and_nest() -> None:
    tree = parse_overrides(["actor.optim.lr=1e-5", "data.train_files=[a, b]", "trainer.val_only=true"])
    assert tree == {
        "actor": {"optim": {"lr": 1e-5}},
        "data": {"train_files": ["a", "b"]},
        "trainer": {"val_only": True},
    }


@pytest.mark.parametrize("override", ["trainer.save_freq", "=3", "a b=3", "a.=3", "x=[1"])
def test_an_override_that_is_not_key_value_is_refused(override: str) -> None:
    with pytest.raises(InvalidConfig, match="override"):
        parse_overrides([override])


def test_a_rollout_is_threshold_of_two_bounds_needs_no_quotes(tmp_path: Path) -> None:
    """Underscores between thousands separate no bounds."""
    (tmp_path / "job.yaml").write_text(
        "trainer: {experiment_name: 2025_11_02, total_training_steps: 10_000}\n"
        "actor: {optim: {lr: 1_000.5}}\n"
        "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 0.5_5}}\n"
    )
    job = load_job(tmp_path / "job.yaml")
    assert job.trainer.experiment_name == "2025_11_02"
    assert (job.trainer.total_training_steps, job.actor.optim.lr) == (10_000, 1000.5)
    assert job.algorithm.rollout_correction.bounds == (0.5, 5)
    job = load_job(tmp_path / "job.yaml", ["algorithm.rollout_correction.rollout_is_threshold=1_5"])
    assert job.algorithm.rollout_correction.bounds == (1, 5)


@pytest.mark.parametrize("key", ["actor.entropy_coeff", "algorithm.gamma", "rollout.temperature"])
def test_no_number_may_be_infinite_or_none(key: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{}")
    for value in (".nan", ".inf", "-.inf"):
        with pytest.raises(InvalidConfig, match=f"'{key}' is -?(nan|inf): "):
            load_job(tmp_path / "job.yaml", [f"{key}={value}"])


def test_an_override_wins_over_the_file_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "trainer": {"save_freq": 2, "test_freq": 3}}))
    job = load_job(path, ["trainer.save_freq=5"])
    assert (job.trainer.save_freq, job.trainer.test_freq) == (5, 3)


def test_the_resolved_file_loads_to_the_same_job(tmp_path: Path) -> None:
    job = make_job({**SMALL, "actor": {"ppo_mini_batch_size": 8, "optim": {"lr": 3e-4}}})
    path = tmp_path / "resolved.yaml"
    path.write_text(job.to_yaml())
    assert load_job(path) == job


def test_one_train_file_may_be_written_without_a_list() -> None:
    assert make_job(
        {**SMALL, "data": {"train_batch_size": 8, "train_files": "a.parquet"}}
    ).data.train_files == ["a.parquet"]


@pytest.mark.parametrize("example", sorted(CHART.glob("examples/*.yaml")), ids=lambda path: path.stem)
def test_chart_values_are_refused_with_where_the_job_is(example: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"has the section job, so it is a values file .* make a file of"):
        load_job(example)
    values = yaml.safe_load(example.read_text(encoding="utf-8"))
    make_job(values["job"] | {"placement": values["placement"]})
