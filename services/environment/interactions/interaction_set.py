"""Makes the interactions of a job, from a YAML file in verl's form."""

from __future__ import annotations

from pathlib import Path

from rolemesh.agents.interactions import BaseInteraction
from rolemesh.config import JobConfig
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import InvalidConfig
from rolemesh.services.environment.interactions.gsm8k_interaction import Gsm8kInteraction
from rolemesh.services.environment.tools.tool_set import class_of, entries_of

INTERACTIONS_PATH = "rollout.multi_turn.interaction_config_path"
# Classes of verl that have a counterpart here.
COUNTERPARTS = {
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": (
        "rolemesh.services.environment.interactions.gsm8k_interaction.Gsm8kInteraction"
    )
}


def interactions_of(job: JobConfig) -> dict[str, BaseInteraction]:
    """Return the job's interactions by name.

    The file rollout.multi_turn.interaction_config_path has them in `interaction`, a list of name, class_name
    and config. Without a file the only one is gsm8k. It finds answers where the reward does
    (reward.answer_chars).

    Raises:
        InvalidConfig: one cannot be made, or two have one name; the message names the file.
    """
    of_gsm8k = {"answer_chars": job.reward.answer_chars}
    path = job.rollout.multi_turn.interaction_config_path
    if path is None:
        return {"gsm8k": Gsm8kInteraction({**of_gsm8k, "name": "gsm8k"})}
    file = Path(path)
    made: dict[str, BaseInteraction] = {}
    entries = entries_of(file, INTERACTIONS_PATH, "interaction", ("name", "class_name", "config"))
    for index, entry in enumerate(entries):
        where = f"{file}: interaction {index + 1}"
        cls = class_of(entry, where, COUNTERPARTS)
        name = entry.get("name") or _named_after(str(entry["class_name"]))
        if name in made:
            raise InvalidConfig(f"{where}: there are two interactions {name!r}; give them names of their own")
        try:
            of_job = of_gsm8k if cls is Gsm8kInteraction else {}
            made[name] = cls({**of_job, **(entry.get("config") or {}), "name": name})
        except Exception as error:
            said = one_line(f"{type(error).__name__}: {error}")
            raise InvalidConfig(f"{where}, {entry['class_name']}: {said}") from error
    return made


def _named_after(path: str) -> str:
    """Return the name that verl gives a class without one: Gsm8kInteraction is gsm8k."""
    return path.rpartition(".")[2].removesuffix("Interaction").lower()
