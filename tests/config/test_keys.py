"""Every key of the job file has an effect that can be named: code outside the schema reads it, or the schema
says that it has none. Found in the sources, by the types that they declare, without running them."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import pkgutil
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import rolemesh as command
from pydantic import BaseModel

import rolemesh.config
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config import Config, JobConfig, load_job, parse_overrides
from rolemesh.config.actor import ActorConfig, PolicyLossConfig
from rolemesh.config.algorithm import AlgorithmConfig
from rolemesh.config.base import NoEffect
from rolemesh.config.job import make_job
from rolemesh.config.rollout import RolloutConfig
from rolemesh.services.controller.main import warn_of_idle_keys
from rolemesh.services.rollout.engines.vllm.arguments import ENGINE

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "rolemesh" / "config"
FILES = [
    path
    for room in ("rolemesh", "services")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not path.is_relative_to(ROOT / "rolemesh" / "v1")
]
for module in pkgutil.iter_modules(rolemesh.config.__path__, "rolemesh.config."):
    importlib.import_module(module.name)


def subclasses(of: type) -> Iterator[type]:
    for child in of.__subclasses__():
        yield child
        yield from subclasses(child)


SECTIONS: dict[str, type[Config]] = {
    c.__name__: c for c in subclasses(Config) if c.__module__.startswith("rolemesh.")
}


def parsed(files: list[Path]) -> dict[Path, ast.Module]:
    """Without the garbage collector: what it runs meanwhile may take stack, which CPython 3.11 counts as the
    parser's own ("AST constructor recursion depth mismatch", gh-106905)."""
    gc.disable()
    try:
        return {path: ast.parse(path.read_text()) for path in files}
    finally:
        gc.enable()


BINDING = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.comprehension, ast.For),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
)


@functools.cache
def walked(statement: ast.stmt) -> tuple[list[Any], list[ast.Attribute]]:
    """The nodes of a statement that bind a name, and its attributes. Sources looks at each three times."""
    nodes = [*ast.walk(statement)]
    return [n for n in nodes if isinstance(n, BINDING)], [n for n in nodes if isinstance(n, ast.Attribute)]


class Sources:
    """Which attributes of which section classes are read, and where.

    A type is the name of a class. It is followed through annotations (of arguments, fields, results), through
    assignments and through attributes of classes that hold a section.
    """

    def __init__(self) -> None:
        self.attributes: dict[str, dict[str, str]] = defaultdict(dict)  # of classes: attribute to type
        self.results: dict[str, str] = {}  # of functions: type
        self.reads: dict[tuple[str, str], set[str]] = defaultdict(set)  # (class, attribute) to readers
        self.trees = parsed(FILES)
        for name, section in SECTIONS.items():
            for field, info in section.model_fields.items():
                self.attributes[name][field] = self.named(str(info.annotation))
        for _ in range(3):  # an attribute's type may come from another one's
            self.reads.clear()
            for path, tree in self.trees.items():
                self.module(path, tree)

    def named(self, annotation: str) -> str:
        """The section, or the class that holds one, that an annotation names."""
        words = re.findall(r"[A-Za-z_]\w*", annotation)
        return next((word for word in words if word in SECTIONS or word in self.attributes), "")

    def module(self, path: Path, tree: ast.Module) -> None:
        where = str(path.relative_to(ROOT))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.class_(where, node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.function(where, node, {}, f"{where}: {node.name}")
            else:
                self.statements(where, [node], {})

    def class_(self, where: str, node: ast.ClassDef) -> None:
        if node.name in SECTIONS and not where.startswith("rolemesh/config/"):
            raise AssertionError(f"{where} has another {node.name}")
        for base in node.bases:
            self.attributes[node.name] |= self.attributes.get(ast.unparse(base), {})
        for item in node.body:
            if (
                isinstance(item, ast.AnnAssign)
                and node.name not in SECTIONS
                and (kind := self.named(ast.unparse(item.annotation)))
            ):
                self.attributes[node.name][ast.unparse(item.target)] = kind
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                reader = (
                    f"{node.name}.{item.name}" if node.name in SECTIONS else f"{where}: {node.name}.{item.name}"
                )
                if node.name in SECTIONS and any("validator" in ast.unparse(d) for d in item.decorator_list):
                    reader = "check"
                if node.name in SECTIONS and item.name.startswith("_check"):
                    reader = "check"
                if item.returns and (kind := self.named(ast.unparse(item.returns))):
                    self.attributes[node.name][item.name] = kind
                self.function(where, item, {"self": node.name}, reader)

    def function(self, where: str, node: Any, env: dict[str, str], reader: str) -> None:
        env = dict(env)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation and (kind := self.named(ast.unparse(argument.annotation))):
                env[argument.arg] = kind
        if node.returns and (kind := self.named(ast.unparse(node.returns))):
            self.results[node.name] = kind
        self.statements(reader, node.body, env)

    def statements(self, reader: str, body: list[ast.stmt], env: dict[str, str]) -> None:
        for statement in body:
            binding, attributes = walked(statement)
            for node in binding:
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    self.bind(reader, node.targets[0], node.value, env)
                elif isinstance(node, ast.NamedExpr):
                    self.bind(reader, node.target, node.value, env)
                elif isinstance(node, ast.AnnAssign) and (kind := self.named(ast.unparse(node.annotation))):
                    self.give(node.target, kind, env)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    for argument in node.args.args:
                        if argument.annotation and (kind := self.named(ast.unparse(argument.annotation))):
                            env[argument.arg] = kind
                elif isinstance(node, ast.comprehension | ast.For):
                    self.bind(reader, node.target, node.iter, env)
            for node in attributes:
                self.type_of(reader, node, env)

    def bind(self, reader: str, target: ast.expr, value: ast.expr, env: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self.bind(reader, one, other, env)
        elif kind := self.type_of(reader, value, env):
            self.give(target, kind, env)

    def give(self, target: ast.expr, kind: str, env: dict[str, str]) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = kind
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        ):
            self.attributes[env.get("self", "")][target.attr] = kind

    def type_of(self, reader: str, node: ast.expr, env: dict[str, str]) -> str:
        match node:
            case ast.Name(id=name):
                return env.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                owner = self.type_of(reader, value, env)
                if owner in SECTIONS and isinstance(node.ctx, ast.Load):
                    self.reads[owner, attribute].add(reader)
                return self.attributes.get(owner, {}).get(attribute, "")
            case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(attribute)), *_]):
                return self.type_of(reader, ast.Attribute(of, attribute, ast.Load()), env)
            case ast.Call(func=ast.Name(id=name)):
                return self.results.get(name, name if name in self.attributes else "")
            case ast.Call(func=ast.Attribute(value=value, attr="model_copy" | "get" | "values")):
                return self.type_of(reader, value, env)
            case ast.Call(func=function):
                return self.type_of(reader, function, env)
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self.type_of(reader, value, env)
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(reader, body, env) or self.type_of(reader, orelse, env)
            case ast.BoolOp(values=values):
                return next((kind for value in values if (kind := self.type_of(reader, value, env))), "")
        return ""

    def readers(self, section: type[Config], attribute: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Who reads it outside the schema's own checks; of a property of the schema, who reads the property."""
        found: set[str] = set()
        for owner in (c.__name__ for c in section.__mro__ if c.__name__ in SECTIONS):
            for reader in self.reads.get((owner, attribute), ()):
                class_, _, method = reader.partition(".")
                if reader == "check" or reader in seen:
                    continue
                if class_ in SECTIONS:
                    for heir in (SECTIONS[class_], *subclasses(SECTIONS[class_])):
                        found |= self.readers(heir, method, seen | {reader})
                else:
                    found.add(reader)
        return found


def keys(section: type[Config], prefix: str = "") -> Iterator[tuple[str, type[Config], str]]:
    """Every leaf of the schema: its dotted key, the class of its section and the field's name."""
    for name, info in section.model_fields.items():
        options = (info.annotation, *typing.get_args(info.annotation))
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is None:
            yield prefix + name, section, name
        else:
            yield from keys(inner, f"{prefix}{name}.")  # type: ignore[arg-type]


# Keys that code takes by name from a table: by getattr.
TABLES: dict[type[Config], set[str]] = {
    AlgorithmConfig: {key for estimator in ESTIMATORS.values() for key in estimator.keys},
    RolloutConfig: set(ENGINE),
    JobConfig: {"plugins"},  # imported before the job is made
    ActorConfig: {key for loss in POLICY_LOSSES.values() for key in (*loss.keys, *loss.choose_keys)}
    | {"clip_ratio", "clip_ratio_low", "clip_ratio_high"},  # clip_low and clip_high
    PolicyLossConfig: {key for loss in POLICY_LOSSES.values() for key in (*loss.keys, *loss.choose_keys)},
}


def has_no_effect(section: type[Config], name: str) -> bool:
    """Whatever its value."""
    return any(isinstance(m, NoEffect) and m.value is None for m in section.model_fields[name].metadata)


def effective(readers: set[str]) -> set[str]:
    idle = ("rolemesh/planner/", "rolemesh/config/agreement.py", "services/command_line/plan.py")
    return {reader for reader in readers if not reader.startswith(idle) and "settings_to_keep" not in reader}


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def test_every_key_is_read_or_is_said_to_have_no_effect(sources: Sources) -> None:
    """A new key needs code that reads it, or a reason in the schema why it changes nothing. Readers that change
    nothing do not count: plans, and the settings that a checkpoint is compared with."""
    ignored = []
    for key, section, name in keys(JobConfig):
        in_a_table = name in TABLES.get(section, ())
        if (
            not in_a_table
            and not has_no_effect(section, name)
            and not effective(sources.readers(section, name))
        ):
            ignored.append(key)
    assert ignored == []


def test_nothing_reads_a_key_that_is_said_to_have_no_effect(sources: Sources) -> None:
    marked = [(section, name) for _, section, name in keys(JobConfig) if has_no_effect(section, name)]
    assert len(marked) == 11
    assert [(s, n) for s, n in marked if n in TABLES.get(s, ()) or effective(sources.readers(s, n))] == []


def test_the_decision_lists_every_key_without_effect() -> None:
    (text,) = (path.read_text() for path in (ROOT / "docs" / "decisions").glob("0009-*.md"))
    marked = {key for key, section, name in keys(JobConfig) if has_no_effect(section, name)}
    assert {key for key in marked if f"`{key}`" not in text} == set()


def test_readers_are_found_through_types_properties_and_names(sources: Sources) -> None:
    def readers(dotted: str) -> set[str]:
        (found,) = (sources.readers(section, name) for key, section, name in keys(JobConfig) if key == dotted)
        return found

    assert "rolemesh/training/optimizer.py: Optimizer.__init__" in readers(
        "critic.optim.lr"
    )  # by its base class
    assert "services/reward/worker.py: RewardWorker._columns" in readers(
        "reward.overlong_buffer.log"
    )  # tells_more
    assert readers("trainer.max_actor_ckpt_to_keep") == {"services/controller/run/loop.py: Run.__init__"}
    assert readers("reference.model.enable_gradient_checkpointing") == set()  # the actor's is read
    assert "rolemesh/training/loop.py: checkpoint_activations" in readers(
        "actor.model.enable_gradient_checkpointing"
    )


NAMED = {
    "reference.model.enable_gradient_checkpointing": "false",
    "reference.model.enable_activation_offload": "true",
    "reward.reward_model.model.enable_gradient_checkpointing": "true",
    "rollout.load_format": "auto",
    "rollout.calculate_log_probs": "true",
    "rollout.prompt_length": "512",
    "rollout.response_length": "512",
    "rollout.agent.num_workers": "4",
    "rollout.multi_turn.max_parallel_calls": "2",
    "reward.reward_manager": "prime",
}


def test_a_key_without_effect_is_warned_of_where_it_is_set_and_only_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warnings(*overrides: str) -> list[str]:
        caplog.clear()
        warn_of_idle_keys(make_job(parse_overrides(overrides)))
        return [record.getMessage() for record in caplog.records]

    assert warnings() == []
    assert warnings("reward.reward_manager=naive") == []
    for key, value in NAMED.items():
        (line,) = warnings(f"{key}={value}")
        assert line.startswith(f"{key} has no effect: ")
    assert len(warnings(*(f"{key}={value}" for key, value in NAMED.items()))) == len(NAMED)


def test_beside_an_adapter_no_key_of_the_reference_has_an_effect() -> None:
    adapter = ("actor.model.lora_rank=8", "algorithm.use_kl_in_reward=true")
    rows = "reference.log_prob_micro_batch_size_per_gpu=4"
    assert not [idle for idle in make_job(parse_overrides([rows])).idle_keys() if idle.is_set]
    idle_keys = make_job(parse_overrides([rows, *adapter])).idle_keys()
    assert [idle.key for idle in idle_keys if idle.is_set] == [rows.partition("=")[0]]
    reference = {key for key, _, _ in keys(JobConfig) if key.startswith("reference.")}
    assert reference <= {idle.key for idle in idle_keys}


def test_a_key_that_another_one_overrules_is_warned_of() -> None:
    def warned(*overrides: str) -> list[str]:
        return [idle.key for idle in make_job(parse_overrides(overrides)).idle_keys() if idle.is_set]

    where = "trainer.resume_from_path=runs/global_step_3"
    assert warned(where) == ["trainer.resume_from_path"]
    assert warned(where, "trainer.resume_mode=resume_path") == []
    servers = ("rollout.name=openai", "rollout.openai.urls=[http://a:1]", "rollout.openai.weights_dir=/shared")
    assert warned("rollout.free_cache_engine=false", *servers) == ["rollout.free_cache_engine"]
    assert warned("rollout.free_cache_engine=false") == []


def test_the_resolved_job_file_begins_with_the_same_warnings(tmp_path: Path) -> None:
    for overrides in ([], [f"{key}={value}" for key, value in NAMED.items()], ["actor.model.lora_rank=8"]):
        job = make_job(parse_overrides(["actor.use_kl_loss=true", *overrides]))
        (tmp_path / "config.yaml").write_text(job.to_yaml())
        again = load_job(tmp_path / "config.yaml")
        assert again == job
        set_keys = [[idle.key for idle in either.idle_keys() if idle.is_set] for either in (job, again)]
        assert set_keys[0] == set_keys[1]


async def test_a_run_begins_with_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    addresses = [word for role in ("actor", "rollout", "reward") for word in (f"--{role}", "127.0.0.1:1")]
    wrong = ("reward.reward_manager=prime", "actor.model.path=nowhere")
    async with command("control", "--config", "configs/tiny.yaml", *addresses, *wrong) as launched:
        _, output = await launched.end()
    lines = output.splitlines()
    assert [line for line in lines if "reward.reward_manager has no effect: prime does what naive does" in line]
    assert len([line for line in lines if "has no effect" in line]) == 1
    assert "no such model directory: nowhere" in lines[-1]
