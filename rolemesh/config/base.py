"""The base of every section of the job file: typed, frozen, and strict about unknown keys."""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from rolemesh.catalog.catalog import Catalog
from rolemesh.config.yaml_file import EXPONENT, MAX_DEPTH, check_written, one_line, parse_value, read_yaml
from rolemesh.errors import InvalidConfig

# Hints for sections and keys of other systems' job files. ROLE is the section of any model.
BY_THE_ACTOR = "the actor computes the old log-probabilities: set actor."
ELSEWHERE = {
    "actor_rollout_ref": "its parts are the top-level sections actor, rollout and reference, and actor.model",
    "ref": "the section is called reference",
    "model": "each role has its own: actor.model, reference.model, critic.model, reward.reward_model.model",
    "reward_model": (
        "it is reward.reward_model; its reward_manager is reward.reward_manager, and its "
        "reward_kwargs.overlong_buffer_cfg is reward.overlong_buffer"
    ),
    "ROLE.reward_kwargs": "its overlong_buffer_cfg is reward.overlong_buffer",
    "reward.reward_kwargs": "its overlong_buffer_cfg is reward.overlong_buffer",
    "custom_reward_function": "it is reward.custom_reward_function",
    "ROLE.tis_imp_ratio_cap": "it is algorithm.rollout_correction.rollout_is_threshold, with rollout_is: token",
    "ROLE.strategy": "not here: several ranks shard a model by FSDP2, there is no Megatron; leave it out",
    "ROLE.use_torch_compile": "not here: models run as Transformers defines them, uncompiled; leave it out",
    "ROLE.checkpoint": "not here: checkpoints are a Hugging Face directory and the optimizer; leave it out",
    "ROLE.entropy_checkpointing": "not here: long rows always compute the entropy in chunks, each again in the "
    "backward pass; leave it out",
    "ROLE.use_reward_loop": "not here: rows are scored as their answers arrive; leave it out",
    "reward.use_reward_loop": "not here: rows are scored as their answers arrive; leave it out",
    "use_reward_loop": "not here: rows are scored as their answers arrive; leave it out",
    "ROLE.model.use_liger": "not here: the model runs as Transformers defines it; leave it out",
    "ROLE.model.use_fused_kernels": "not here: the model runs as Transformers defines it; leave it out",
    "ROLE.model.override_config": "not here: the model is as its config.json says; edit that in a local copy",
    "rollout.engine_kwargs": "not here: set keys of rollout, or start servers yourself (rollout.name: openai)",
    "rollout.max_model_len": "not here: it is data.max_prompt_length + data.max_response_length; set those",
    "rollout.over_sample_rate": "not here: a step waits for all of its rows; leave it out",
    "rollout.layered_summon": "not here: each rank copies its rows of the weights; leave it out",
    "rollout.multi_stage_wake_up": "not here: weights always wake before the KV cache; leave it out",
    "rollout.log_prob_micro_batch_size": f"{BY_THE_ACTOR}ppo_micro_batch_size_per_gpu",
    "rollout.log_prob_micro_batch_size_per_gpu": f"{BY_THE_ACTOR}ppo_micro_batch_size_per_gpu",
    "rollout.log_prob_use_dynamic_bsz": f"{BY_THE_ACTOR}use_dynamic_bsz",
    "rollout.log_prob_max_token_len_per_gpu": f"{BY_THE_ACTOR}ppo_max_token_len_per_gpu",
    "ROLE.ppo_micro_batch_size": "it is ppo_micro_batch_size_per_gpu: rows of one rank, not of all",
    "ROLE.forward_micro_batch_size": "it is ppo_micro_batch_size_per_gpu: rows of one rank, not of all",
    "algorithm.lambda": "it is algorithm.lam",
    "data.micro_batch_size": "it is actor.ppo_micro_batch_size_per_gpu: rows of one rank, not of all",
    "data.micro_batch_size_per_gpu": "it is actor.ppo_micro_batch_size_per_gpu",
    "optim": "it is actor.optim",
    "global_profiler": "its steps are trainer.profile_steps; leave out the rest",
    "data.path": "it is data.val_files of rolemesh generate and evaluate, and data.train_files of a run",
    "data.n_samples": "it is rollout.val_kwargs.n of rolemesh generate",
    "data.output_path": "it is the option --output of rolemesh generate and evaluate",
    "data.data_source_key": "it is data.reward_fn_key",
    "data.custom_cls": "not here: register a data set in a plug-in, and name it in data.dataset",
    "data.image_key": "not here: prompts are text only; leave it out",
    "data.return_raw_chat": "not here: agents always get a row's messages; leave it out",
}
ROLE = re.compile(r"^(actor|critic|reference|reward\.reward_model)\.")
# A key on the command line. A mapping's own keys may have hyphens: rollout.multi_turn.mcp_servers.my-server.url
DOTTED = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")
OF_HYDRA = {"+": "; leave out the +", "~": "; a key can only be taken out in the file"}
KINDS = {bool: "boolean", int: "number", float: "number", str: "string"}
UNION_MEMBER = re.compile(r"str|int|float|bool|tuple\[.*")  # pydantic's names of a union's kinds
MAX_FINDINGS = 20  # errors reported at once
# Helm and JSON hold numbers as doubles. Up to here each whole number has a double of its own; 2^53 and 2^53 + 1
# have the same one.
MAX_WHOLE = 2**53 - 1


class Config(BaseModel):
    """Base of the job file's sections. Unknown keys are errors, and a section is immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _kinds_stay_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse conversions between booleans, numbers and strings, as the chart's schema does.

        pydantic accepts true for 1, 1 for true, and "1" for either. Its strict mode would refuse too much: a
        list for a tuple, 8.0 for an integer (as Helm may write 8), and 1e-6, which other YAML readers parse as
        text.
        """
        kinds = kinds_of(cls.model_fields[str(info.field_name)].annotation)
        if kinds & {"boolean", "number"}:
            for scalar in _scalars(value):
                kind = KINDS.get(type(scalar))
                if kind and kind not in kinds and not (kind == "string" and EXPONENT.match(scalar)):
                    expected = " or ".join(sorted(kinds))
                    raise PydanticCustomError("kind", f"Input should be a valid {expected}, but is a {kind}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _arrives_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse whole numbers that Helm would change, and numbers that are not finite."""
        if section_type(cls, str(info.field_name)):  # its own fields name the key
            return value
        annotation = cls.model_fields[str(info.field_name)].annotation
        for scalar in _scalars(value):
            if not takes(annotation, int) or type(scalar) not in (int, float):
                continue
            if not math.isfinite(scalar):
                raise PydanticCustomError("finite_number", "Input should be a finite number")
            is_whole = type(scalar) is int or not takes(annotation, float)
            if is_whole and abs(scalar) > MAX_WHOLE:
                raise PydanticCustomError(
                    "whole_number",
                    "a number above 2^53 - 1 ({most}) becomes another one in Helm; choose a smaller one",
                    {"most": str(MAX_WHOLE)},
                )
        return value


def _expanded(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise PydanticCustomError("home", "there is no such user; write ./~ if the name begins with ~")
    return expanded


LOCAL = AfterValidator(_expanded)
# A path in the file system: `~` is the home directory of the process that reads the job file.
LocalPath = Annotated[str, LOCAL]


def absolute_path(path: str | Path) -> Path:
    """Return a path as an absolute one without `..`, which no role takes from a caller (rolemesh/home.py).

    `link/..` is the folder above the link's target, so links of a path with `..` are followed. A path without
    `..` keeps its links.

    Raises:
        InvalidConfig: as resolved.
    """
    path = Path(path)
    return resolved(path) if ".." in path.parts else path.absolute()


def resolved(path: Path) -> Path:
    """Return a path with its links followed, the same for all spellings of one directory. It need not exist.

    Raises:
        InvalidConfig: its links form a loop.
    """
    try:
        path.stat()  # realpath reports no loop, and Path.resolve not in every version of Python
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidConfig(f"the links in the path {path} form a loop") from error
    return Path(os.path.realpath(path))


def path_keys(schema: type[BaseModel]) -> list[str]:
    """Return the dotted keys of a schema whose values are paths in the file system, or lists of them."""
    keys = []
    for key in leaves(schema):
        *parents, leaf = key.split(".")
        section = schema
        for part in parents:
            section = section_type(section, part) or section
        field = section.model_fields[leaf]
        if LOCAL in field.metadata or _names_paths(field.annotation):
            keys.append(key)
    return keys


def _names_paths(annotation: Any) -> bool:
    return LOCAL in getattr(annotation, "__metadata__", ()) or any(map(_names_paths, get_args(annotation)))


def name_in(catalog: Catalog[Any]) -> AfterValidator:
    """Make a field's annotation: the value must be a name in the catalog, built in or from a plug-in."""

    def check(name: str | None) -> str | None:
        if name is not None and name not in catalog:
            raise PydanticCustomError("unknown_name", "{known}", {"known": catalog.unknown(name)})
        return name

    return AfterValidator(check)


def options_of(catalog: Catalog[Any], name_key: str) -> AfterValidator:
    """Make the annotation of `options`: they must fit the declared part, whose defaults are filled in.

    Args:
        catalog: the catalog of the part.
        name_key: the key with the part's name, in the same section and above this key.
    """

    def check(given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if name_key not in info.data:  # the name itself is invalid
            return given
        name = info.data[name_key]
        schema = None if name is None else catalog[name].options
        if schema is not None:
            try:
                options: dict[str, Any] = schema.model_validate(given).model_dump()
            except ValidationError as error:
                raise ValueError(str(explain(error, schema, name))) from error
            check_written(options, lambda written: schema.model_validate(written).model_dump())
            return options
        if given and name is None:
            raise ValueError(f"{next(iter(given))} is set, and {name_key} is null; name the {name_key}, too")
        if given:
            raise ValueError(f"{next(iter(given))} is set, but {name_key} {name} has no options")
        return {}

    return AfterValidator(check)


def kinds_of(annotation: Any) -> set[str]:
    """Return which of KINDS a field accepts, also in a list or mapping; empty if it accepts anything."""
    if isinstance(annotation, type) and annotation in KINDS:
        return {KINDS[annotation]}
    return {kind for part in get_args(annotation) for kind in kinds_of(part)}


def takes(annotation: Any, kind: type) -> bool:
    """Return whether a field takes values of a kind, also in a union or a list, or any value."""
    return annotation in (kind, Any) or any(takes(part, kind) for part in get_args(annotation))


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _scalars(part)
    else:
        yield value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse the command line's overrides of a job file.

    An override is another file (`configs/recipes/dapo.yaml`) or a single key with a YAML value:
    `["trainer.save_freq=5"]` is `{"trainer": {"save_freq": 5}}`. A file overrides the files to its left, and
    keys override all files. Like files, sections are merged.

    Raises:
        InvalidConfig: an override is neither key=value nor a YAML file, its value has a comment, it contradicts
            an earlier one, or a file cannot be read.
    """
    files: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    for override in overrides:
        if is_file(override):
            files = merge(files, read_yaml(Path(override)))
            continue
        key, equals, text = override.partition("=")
        if not equals or not DOTTED.fullmatch(key):
            hint = OF_HYDRA.get(override[:1], "")
            raise InvalidConfig(
                f"override {override!r} is not of the form section.key=value, nor a .yaml file{hint}"
            )
        value = parse_value(text, f"override {override!r:.200}")
        parts = key.split(".")
        if len(parts) > MAX_DEPTH:
            raise InvalidConfig(
                f"override {override!r:.200}: the key has {len(parts)} parts; no key has more than 5"
            )
        over = reduce(lambda below, part: {part: below}, reversed(parts), value)
        if _contradict(tree, over):
            raise InvalidConfig(f"override {override!r} contradicts an earlier override")
        tree = merge(tree, over)
    return merge(files, tree)


def is_file(override: str) -> bool:
    """Return whether an override names a file. The names of its folders may have a =, keys have no /."""
    key, equals, _ = override.partition("=")
    return override.endswith((".yaml", ".yml")) and (not equals or "/" in key)


def _contradict(earlier: Any, later: Any) -> bool:
    """Return whether one has a value where the other has a section."""
    if isinstance(earlier, Mapping) and isinstance(later, Mapping):
        return any(_contradict(earlier[key], later[key]) for key in earlier.keys() & later.keys())
    return isinstance(earlier, Mapping) or isinstance(later, Mapping)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`, section by section; a value of `over` replaces the value of `base`."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def explain(error: ValidationError, schema: type[BaseModel], where: str) -> InvalidConfig:
    """Put pydantic's errors into one line, with the nearest valid key or value for an unknown one."""
    findings = _joined(error.errors())
    sentences = [_explained(finding, schema) for finding in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        sentences.append(f"and {len(findings) - MAX_FINDINGS} more")
    return InvalidConfig(
        one_line(f"{where}: " + "; ".join(sentences)),
        findings=[one_line(f"{where}: {sentence}") for sentence in sentences],
    )


def _joined(findings: list[ErrorDetails]) -> list[ErrorDetails]:
    """Join the findings of one value: a union has one for each kind, with the kind's name in its place."""
    joined: dict[tuple[int | str, ...], ErrorDetails] = {}
    for finding in findings:
        place = finding["loc"]
        words = finding["msg"]
        last = max((at for at, part in enumerate(place) if isinstance(part, str)), default=0)
        if last and finding["type"] != "extra_forbidden" and UNION_MEMBER.fullmatch(str(place[last])):
            place = (*place[:last], *place[last + 1 :])
        if place in joined:
            words = f"{joined[place]['msg']} or {words.removeprefix('Input should be ')}"
        joined[place] = {**finding, "loc": place, "msg": words}
    return list(joined.values())


def _explained(finding: ErrorDetails, schema: type[BaseModel]) -> str:
    path = [part for part in finding["loc"] if isinstance(part, str)]
    key = ".".join(map(str, finding["loc"]))
    given = f"{finding['input']!r:.200}"
    match finding["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r:.200}{_hint(schema, path)}"
        case "literal_error":
            return f"{key!r} is {given}{_choice(finding)}"
        case "unknown_name":
            return f"{key!r} is {given}, {finding['ctx']['known']}"
        case "missing" if isinstance(finding["loc"][-1], int):
            return f"{key.rpartition('.')[0]!r} is {given}, which has too few values"
        case "missing":
            return f"{key!r} is missing and has no default"
        case "value_error":
            reason = str(finding["ctx"]["error"])
            return f"{key}: {reason}" if key else reason
        case _:
            words = re.sub(r"dictionary or instance of \w+", "section", finding["msg"])
            return f"{key!r:.200} is {given}: {words.replace('tuple', 'list').replace('Tuple', 'List')}"


def _hint(schema: type[BaseModel], path: list[str]) -> str:
    *parents, wrong = path
    if hint := ELSEWHERE.get(ROLE.sub("ROLE.", ".".join(path))):
        return f" ({hint})"
    section: type[BaseModel] | None = schema
    for part in parents:
        section = section_type(section, part) if section else None
    if section is None:
        return ""
    near = difflib.get_close_matches(wrong, section.model_fields, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*parents, near[0]])!r}?"
    if far := [key for key in leaves(schema) if key.rpartition(".")[2] == wrong]:
        return f"; did you mean {far[0]!r}?"
    return f"; known here: {', '.join(section.model_fields)}"


def _choice(finding: ErrorDetails) -> str:
    """List all valid values of a key, and the nearest one."""
    known = re.findall(r"'([^']*)'", finding["ctx"]["expected"])
    near = difflib.get_close_matches(str(finding["input"]), known, n=1, cutoff=0.6)
    return ", which is none of " + ", ".join(known) + "".join(f"; did you mean {name!r}?" for name in near)


def section_type(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    known = schema.model_fields.get(name)
    if known is None:
        return None
    if get_origin(known.annotation) is dict:  # of sections by a name of the user's: a key itself
        return None
    options = (known.annotation, *get_args(known.annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def leaves(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a schema."""
    for name in schema.model_fields:
        section = section_type(schema, name)
        if section is None:
            yield prefix + name
        else:
            yield from leaves(section, f"{prefix}{name}.")


def value_at(section: Config, key: str) -> object:
    """Return the value of a dotted key of a section."""
    value: object = section
    for part in key.split("."):
        value = getattr(value, part)
    return value


# The rule for every key of the job file: it has an effect, or it is refused with a message, or the run starts
# with a warning (docs/decisions/0009-no-key-is-ignored-in-silence.md, unused_keys.py).
@dataclass(frozen=True)
class NoEffect:
    """Marks a field that is accepted without effect, because other systems' job files have it.

    Args:
        reason: completes the sentence "KEY has no effect: …".
        value: the only value without effect; None: no value has an effect.
    """

    reason: str
    value: Any = None
