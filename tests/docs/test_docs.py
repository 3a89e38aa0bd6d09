"""What the docs name exists: files, links, commands, keys, metrics, calls and names of the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer
import yaml
from syntax_trees import parsed

import rolemesh
from benchmarks.demo import SEEDS
from rolemesh.columns import COLUMNS
from rolemesh.config import JobConfig
from rolemesh.config.base import leaves
from rolemesh.roles import Actor, Critic, Environment, Reference, Reward, Rollout
from rolemesh.services.command_line.app import app

ROOT = Path(__file__).parents[2]
DOCS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


ROOMS = [
    "rolemesh",
    "services",
    "docs",
    "tests",
    "charts",
    "helm_values",
    "configs",
    "benchmarks",
    "monitoring",
    "proto",
    "scripts",
]
NO_TEXT = (".png", ".lock", ".pyc", ".tgz", ".safetensors", ".binpb")


@cache
def texts() -> dict[Path, str]:
    """Every text file of the repository, relative to its root; results of benchmarks apart."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")]
    found += [ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml")]
    found += [path for room in ROOMS for path in sorted((ROOT / room).rglob("*")) if path.is_file()]
    # Other processes write bytecode meanwhile.
    left_out = {"results", "__pycache__"}
    found = [path for path in found if path.suffix not in NO_TEXT and left_out.isdisjoint(path.parts)]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in found}


@cache
def words_of_the_code() -> frozenset[str]:
    """Every word of every file that is not documentation, these tests' own apart."""
    code = (text for path, text in texts().items() if path.suffix != ".md" and path.name != "test_docs.py")
    words = {word for text in code for word in re.findall(r"\w+", text)}
    return frozenset(words | {path.stem for path in texts()})


def quoted(path: Path) -> Iterator[str]:
    """What stands in backticks, blocks of code apart."""
    text = re.sub(r"^( *)```.*?^\1```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text))


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --------------------------------------------------------------------------- files and links


@pytest.mark.parametrize("path", DOCS, ids=by_name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, target


CITED = re.compile(rf"(?<![\w/.\-{{}}$)@:])(?:{'|'.join(ROOMS)})/[\w./{{}},*\-]*[\w*}}]")
NO_FILES = {
    "rolemesh/arithmetic": "a data_source",
    "charts/rlhf-job/examples/tiny-{strategy}.yaml": "a template",
}


def alternatives(pattern: str) -> list[str]:
    """`{a,b}.py` is two files; an end of a longer brace is none of the name."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern.rstrip("}.,")]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [name for choice in found[1].split(",") for name in alternatives(before + choice + after)]


def test_every_file_that_a_text_or_a_comment_cites_is_there() -> None:
    missing = []
    for path, text in texts().items():
        cited = [name for name in CITED.findall(text) if name not in NO_FILES]
        for name in (each for pattern in cited for each in alternatives(pattern)):
            if not any(ROOT.glob(name)) and not (ROOT / "proto" / name).exists():
                missing.append(f"{path}: {name}")
    assert missing == []


# --------------------------------------------------------------------------------- commands


def commands() -> Iterator[tuple[str, str]]:
    """Where it stands, and a command line of ours: in a block of code, in backticks, in a job file's or an
    example's comments, or in --help."""
    for path, text in texts().items():
        if path.suffix not in (".md", ".yaml") or "templates" in path.parts:
            continue
        joined = text.replace("\\\n", " ")
        lines = [line.lstrip("#$ ") for line in joined.splitlines()]
        spans = [" ".join(found.split()) for found in re.findall(r"`(rolemesh [^`]+)`", joined)]
        for line in (*lines, *spans):
            if re.match(r"rolemesh [a-z]", line):
                yield str(path), re.split(r"\s{3,}|\s+#|\)|; ", line)[0]
    for command in subcommands(command_line()):
        epilog = (command.epilog or "").partition(": ")[2]
        yield from (("--help", line) for line in epilog.split(" && ") if line)


@cache
def command_line() -> Any:
    """What typer makes of our commands, in a tenth of a second."""
    return typer.main.get_command(app)


def subcommands(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from subcommands(inner)


def overrides_of(line: str) -> list[str]:
    """Of a whole command line, which the command line's own parser reads. One that is named alone, as in "what
    `rolemesh plan` prints", has to be a command."""
    words, command = shlex.split(line)[1:], command_line()
    while hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    params = command.make_context(command.name, words).params if words else {}  # raises what a user would see
    return list(params.get("overrides") or ())


COMMANDS = sorted(set(commands()))


def test_there_are_commands_in_every_kind_of_text() -> None:
    assert len(COMMANDS) > 40
    assert {"README.md", "docs/kubernetes.md", "configs/tiny.yaml", "--help"} <= {
        where for where, _ in COMMANDS
    }


@pytest.mark.parametrize(("where", "line"), COMMANDS)
def test_every_command_is_one_that_the_command_line_takes(where: str, line: str) -> None:
    for override in overrides_of(line.replace("…", "")):
        key, equals, _ = override.partition("=")
        if equals:
            assert key in set(leaves(JobConfig)), f"{where}: {key}"
        elif override.startswith("configs/"):
            assert (ROOT / override).is_file(), f"{where}: {override}"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCS:
        named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", path.read_text(), re.MULTILINE)
        assert {name for pair in named for name in pair if name} <= targets, path


def test_every_version_is_the_packages() -> None:
    chart = yaml.safe_load((ROOT / "charts/rlhf-job/Chart.yaml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {chart["version"], chart["appVersion"], citation["version"]} == {rolemesh.__version__}


# ------------------------------------------------------------------------------------- keys


@cache
def values_keys() -> frozenset[str]:
    """Every dotted key of the chart's values, less the job's own."""
    schema = json.loads((ROOT / "charts/rlhf-job/values.schema.json").read_text())

    def walk(node: dict[str, Any], prefix: str) -> Iterator[str]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for option in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
            for name, inner in option.get("properties", {}).items():
                yield prefix + name
                if prefix + name != "job":
                    yield from walk(inner, f"{prefix}{name}.")

    return frozenset(walk(schema, ""))


SECTIONS = tuple(JobConfig.model_fields)
ROLE_METHODS = {
    f"{role.__name__.lower()}.{name}"
    for role in (Actor, Critic, Environment, Reference, Reward, Rollout)
    for name in vars(role)
}
DOTTED = re.compile(r"(?<![\w./-])([a-z][\w]*(?:\.\w+|\.<\w+>)+(?:\.\*)?)(?![\w/(-])")
FILES = (".py", ".md", ".json", ".gz", ".yaml", ".yml", ".proto", ".png", ".jsonl", ".lock", ".crt", ".key")


def dotted_keys(text: str) -> Iterator[str]:
    for key in DOTTED.findall(text):
        if not key.endswith(FILES):
            yield key.removesuffix(".*")


@pytest.mark.parametrize("path", DOCS, ids=by_name)
def test_every_key_is_one_of_the_job_file_or_of_the_chart(path: Path) -> None:
    keys = set(leaves(JobConfig))
    parents = {key.rsplit(".", n)[0] for key in keys for n in range(1, key.count(".") + 1)}
    chart = values_keys()
    roots = {key.partition(".")[0] for key in chart} - {"job", "image"}
    for key in (key for text in quoted(path) for key in dotted_keys(text)):
        root, _, rest = key.removeprefix("job.").partition(".")
        if root in SECTIONS and key not in ROLE_METHODS:
            assert f"{root}.{rest}" in keys | parents | chart, key
        elif (
            root in roots and not key.startswith("job.") and not (ROOT / f"{key.replace('.', '/')}.py").exists()
        ):
            assert (
                any(re.fullmatch(re.sub(r"<\w+>", "[^.]+", key), known) for known in chart) or "groups." in key
            ), key


# ---------------------------------------------------------------------------------- metrics


@cache
def metric_patterns() -> re.Pattern[str]:
    """Names with a slash that the code writes: literals, and f-strings with anything in their gaps."""
    found = set()
    for path, text in texts().items():
        if path.suffix != ".py" or path.parts[0] not in ("rolemesh", "services"):
            continue
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.escape(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    re.escape(str(v.value)) if isinstance(v, ast.Constant) else r"[\w@/.-]+"
                    for v in node.values
                )
                found.add("".join(parts))
    return re.compile("|".join(sorted(f for f in found if "/" in f and re.search(r"[a-z]{2}", f))))


GROUPS = (
    *("actor", "critic", "rollout", "rollout_corr", "reward", "response_length", "prompt_length"),
    *("timing_s", "perf", "sampling", "train", "training", "val-core", "val-aux"),
)
METRIC = re.compile(rf"(?:{'|'.join(GROUPS)})/[\w@/]+")


@pytest.mark.parametrize("path", DOCS, ids=by_name)
def test_every_metric_is_one_that_the_code_writes(path: Path) -> None:
    named = [
        text for text in quoted(path) if METRIC.fullmatch(text) and not (ROOT / "services" / text).exists()
    ]
    assert [name for name in named if not metric_patterns().fullmatch(name)] == []
    exported = re.findall(r"rolemesh_[a-z_]+", (ROOT / "rolemesh" / "telemetry" / "metrics.py").read_text())
    prometheus = [name for text in quoted(path) for name in re.findall(r"rolemesh_[a-z_]+", text)]
    known = (*exported, "rolemesh_job")  # a label
    written = [name.removesuffix("_total") for name in prometheus]  # prometheus_client's ending of a counter
    assert [name for name in written if not any(each.startswith(name) for each in known)] == []


def words_of(names: Iterable[str]) -> set[str]:
    """The words in names of metrics, without placeholders: of `rollout_corr/kl`, rollout_corr and kl."""
    return {word for name in names for word in re.findall(r"[\w@-]{2,}", re.sub(r"<\w+>", "", name))}


def test_a_page_named_in_code_explains_the_metrics_of_the_module() -> None:
    """The page has every metric that the module writes."""
    metrics = words_of(
        name for name in quoted(ROOT / "docs/metrics.md") if name.startswith(tuple(f"{g}/" for g in GROUPS))
    )
    said = re.compile(r"docs/(\w+\.md) explains each|explained in docs/(\w+\.md)")
    missing, num_said = {}, 0
    for path, text in texts().items():
        for pair in said.findall(" ".join(text.split())) if path.parts[0] in ("rolemesh", "services") else ():
            page = "".join(pair)
            num_said += 1
            nodes = ast.walk(parsed(text))
            strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            written = words_of(string for string in strings if " " not in string) & metrics
            assert len(written) > 5, path
            if absent := written - words_of(quoted(ROOT / "docs" / page)):
                missing[f"{path} says {page}"] = sorted(absent)
    assert num_said >= 3
    assert missing == {}


# ------------------------------------------------------------------------------------ names

# verl's keys and commands, which the docs name and this project does not have; and words of Kubernetes.
OTHERS = {
    *("use_liger", "use_prefix_grouper", "use_fused_kernels", "use_torch_compile", "override_config"),
    *("custom_cls", "image_key", "return_raw_chat", "sft_trainer", "main_generation", "main_eval"),
    *("engine_kwargs", "actor_rollout_ref", "warmup_style"),
    "verl_examples",
    *("PodSecurity", "ContainerCreating", "ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff"),
}


@pytest.mark.parametrize("path", DOCS, ids=by_name)
def test_every_name_of_the_code_is_in_the_code(path: Path) -> None:
    """Calls, classes, errors, columns, constants: CamelCase, UPPER_CASE and snake_case in backticks."""
    looks_like_a_name = re.compile(r"[A-Z]+[a-z]+[A-Z]\w*|[A-Z]{2,}_[A-Z_]+|[a-z]{2,}(?:_[a-z]+)+")
    ours = [text for text in quoted(path) if not text.startswith("kubectl ") and not METRIC.fullmatch(text)]
    named = [word for text in ours for word in re.findall(r"[A-Za-z_]\w*", text)]
    names = {word for word in named if looks_like_a_name.fullmatch(word)}
    assert names - words_of_the_code() - OTHERS == set()


# ----------------------------------------------------------------------- panels and results


@pytest.mark.parametrize("path", [p for p in DOCS if p.parent.name == "runbooks"], ids=by_name)
def test_every_panel_that_a_runbook_names_is_on_its_dashboard(path: Path) -> None:
    boards = {
        board.stem: [panel["title"] for panel in json.loads(board.read_text())["panels"]]
        for board in (ROOT / "charts/rlhf-job/dashboards").glob("*.json")
    }
    text = " ".join(path.read_text(encoding="utf-8").split())
    for board, rest in re.findall(rf"\*({'|'.join(boards)})\* / ([^*]+)", text):
        assert any(rest.startswith(title) for title in boards[board]), rest[:60]


def test_the_table_of_a_step_has_the_numbers_of_its_results() -> None:
    """Medians of the rounds' ratios, to two digits."""
    steps = json.loads((ROOT / "benchmarks/results/step.json").read_text())["steps"]
    order = ("GRPO, full answers", "PPO, full answers", "GRPO, uneven answers", "PPO, uneven answers")

    def row(ours: str, theirs: str) -> str:
        pairs = [
            zip(steps[name][ours]["seconds"], steps[name][theirs]["seconds"], strict=True) for name in order
        ]
        return " | ".join(f"{median(a / b for a, b in pair):.2f}" for pair in pairs)

    text = (ROOT / "docs/profiling.md").read_text()
    assert f"| ours over the loop by hand | {row('ours', 'by hand')} |" in text
    assert f"| five processes over the loop by hand | {row('ours, five processes', 'by hand')} |" in text
    assert f"| ours over TRL | {row('ours', 'TRL')} |" in text
    assert f"| ours in `bypass_mode` over TRL | {row('ours, bypass_mode', 'TRL')} |" in text
    shares = " | ".join(f"{steps[name]['ours']['share_not_computing']:.2f}" for name in order)
    assert f"| share of ours not in model computation | {shares} |" in text


def test_the_planners_page_has_the_range_of_its_results() -> None:
    plan = json.loads((ROOT / "benchmarks/results/plan.json").read_text())
    text = " ".join((ROOT / "docs/planner.md").read_text().split())
    memory = [found["ratio"] for found in plan["memory"]]
    assert f"estimates are {min(memory):.2f} to {max(memory):.2f} times the measured peak" in text
    steps = [1 / found["ratio"] for found in plan["steps"]]
    assert f"too low by a factor of {min(steps):.1f} to {max(steps):.1f}" in text


def test_the_demos_results_have_every_seed_of_its_benchmark() -> None:
    results = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    assert [result["seed"] for result in results] == SEEDS


def test_the_columns_in_the_guide_to_plugins_are_as_declared() -> None:
    guide = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) `\[([A-Z, ]+)\]` \|", guide, re.MULTILINE)
    assert len(rows) == 8
    for name, dtype, axes in rows:
        assert (str(COLUMNS[name].dtype), COLUMNS[name].axes) == (f"torch.{dtype}", axes.replace(", ", "")), (
            name
        )
