"""Finds models and files of the Hugging Face Hub. The only module that talks to the Hub or reads its cache.

huggingface_hub downloads, locks and lays out the cache, so other tools share the files. Its variables apply:
HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT.

`rolemesh run` and `rolemesh fetch` download, once, before any role starts. All else reads the cache only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rolemesh.errors import HubUnavailable, InvalidData, ModelNotFound, RolemeshError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
URI = "hf://datasets/"
FILE = re.compile(rf"{URI}(?P<name>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")

# A model's files. Nothing here is a pickle: *.bin, *.pt and *.pth are never downloaded.
MODEL = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
CODE = ("*.py",)  # with trust_remote_code
# Copies in other formats, beside the weights or in folders. Chat templates may be in a folder.
NOT_MODEL = (
    "consolidated*",
    *(f"*/{pattern}" for pattern in (*MODEL, "*.py") if pattern != "*.jinja"),
)

Patterns = tuple[str, ...]


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub.

    Args:
        name: OWNER/NAME.
        revision: a branch, a tag or a commit; empty: main.
        kind: what it holds.
    """

    name: str
    revision: str = ""
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        return self.name + (f" at revision {self.revision}" if self.revision else "")


def is_name(path: str) -> bool:
    """Return whether a model's path may be a Hub name, OWNER/NAME. A directory of this name has precedence."""
    return NAME.fullmatch(path) is not None and not Path(path).is_dir()


def model_files(trust_remote_code: bool) -> Patterns:
    """Return the patterns of a model's files that are downloaded."""
    return MODEL + CODE if trust_remote_code else MODEL


def configuration_files(trust_remote_code: bool) -> Patterns:
    """Return the patterns of the files that describe a model."""
    return ("config.json", *(CODE if trust_remote_code else ()))


def snapshot(repository: Repository, patterns: Patterns, where: str, *, fetch: bool) -> Path:
    """Return the directory of a repository's files in the Hub's cache.

    Args:
        repository: where the files are.
        patterns: of the files, as of fnmatch.
        where: what names the repository, for messages, e.g. "actor.model.path".
        fetch: ask the Hub for the revision's commit, and download the files that the cache lacks. Of several
            processes one downloads a file, and the others wait. A broken connection is resumed. If the process
            is killed, the next one keeps the finished files. If the Hub does not answer, the cache is used.

    Returns:
        The snapshot of one commit; the commit is the directory's name.

    Raises:
        ModelNotFound, InvalidData: of a model or of a data set: there is no such repository or revision, access
            is denied, or the cache lacks files and `fetch` is false.
        HubUnavailable: the Hub did not answer or failed, and the cache lacks files.
    """
    library = _library()
    try:
        found = library.snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=repository.revision or None,
            allow_patterns=list(patterns),
            ignore_patterns=list(NOT_MODEL) if repository.kind == "model" else None,
            local_files_only=not fetch,
        )
    except Exception as error:  # the library and its HTTP client raise many kinds of errors
        raise _explained(error, repository, where, fetch) from error
    return Path(found)


def split_uri(uri: str) -> tuple[Repository, str]:
    """Return the data set and the file of hf://datasets/OWNER/NAME[@REVISION]/PATH.

    Raises:
        InvalidData: it has another form.
    """
    found = FILE.fullmatch(uri)
    if found is None or any(part in ("", ".", "..") for part in found["file"].split("/")):
        raise InvalidData(f"{uri}: expected {URI}OWNER/NAME/FILE or {URI}OWNER/NAME@REVISION/FILE")
    return Repository(found["name"], found["revision"] or "", "dataset"), found["file"]


def data_file(file: str | Path, *, fetch: bool = False) -> str | Path:
    """Return the path, in the Hub's cache, of a file with an hf://datasets/ URI; another path as it is.

    Raises:
        InvalidData, HubUnavailable: as snapshot; or the data set has no such file.
    """
    if not str(file).startswith("hf://"):
        return file
    repository, name = split_uri(str(file))
    escaped = re.sub(r"([*?[])", r"[\1]", name)  # the pattern that matches this name alone
    path = snapshot(repository, (escaped,), str(file), fetch=fetch) / name
    if not path.is_file():
        raise InvalidData(f"{file}: the data set {repository} has no file {name!r}")
    return path


def pinned_file(file: str, *, fetch: bool) -> str:
    """Return an hf://datasets/ URI with the commit as its revision, and another path as it is.

    Raises:
        InvalidData, HubUnavailable: as data_file.
    """
    if not file.startswith("hf://"):
        return file
    repository, name = split_uri(file)
    commit = Path(data_file(file, fetch=fetch)).parents[name.count("/")].name
    return f"{URI}{repository.name}@{commit}/{name}"


@cache
def _library() -> Any:
    """Return huggingface_hub, with a time limit for every request: some of its own have none."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    def limited(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        kinds = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {
            kind: given.get(kind) or constants.HF_HUB_DOWNLOAD_TIMEOUT for kind in kinds
        }

    def client() -> Any:
        made = _http.default_client_factory()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], limited]}
        return made

    huggingface_hub.set_client_factory(client)
    return huggingface_hub


def _explained(error: Exception, repository: Repository, where: str, fetch: bool) -> RolemeshError:
    """Return the error to raise for one of huggingface_hub's: what failed, where, and what to do."""
    from huggingface_hub import constants, errors

    wrong: type[RolemeshError] = ModelNotFound if repository.kind == "model" else InvalidData
    endpoint = f"{constants.ENDPOINT} (HF_ENDPOINT)"
    of_hub = next((e for e in (error, error.__cause__) if isinstance(e, errors.HfHubHTTPError)), None)
    status = of_hub.response.status_code if of_hub is not None else None
    subject = f"{where}: {repository.name}"
    no_directory = "not a directory, and " if repository.kind == "model" else ""
    if isinstance(error, errors.LocalEntryNotFoundError) and (not fetch or constants.HF_HUB_OFFLINE):
        why = " and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
        return wrong(
            f"{where}: {repository} is {no_directory}not completely in the Hub's cache "
            f"{constants.HF_HUB_CACHE} (HF_HOME){why}; `rolemesh fetch JOB_FILE` downloads it"
        )
    if isinstance(error, errors.HFValidationError):  # no request was made
        return wrong(f"{subject} is {no_directory}not a name at the Hub: {error}")
    if isinstance(of_hub, errors.RevisionNotFoundError):
        return wrong(f"{subject} has no revision {repository.revision or 'main'!r} at {endpoint}")
    if isinstance(of_hub, errors.GatedRepoError):
        return wrong(
            f"{subject} is gated at {endpoint} (status {status}): accept its terms on its page there, and set "
            "HF_TOKEN to a token of the same account"
        )
    if isinstance(of_hub, errors.RepositoryNotFoundError) or status == 401:  # the Hub does not tell them apart
        return wrong(
            f"{subject} is {no_directory}not a {repository.kind} at {endpoint} that the token may read (status "
            f"{status}): check the name, or set HF_TOKEN if it is private"
        )
    if status == 403:
        return wrong(f"{subject}: {endpoint} denies access (status 403): HF_TOKEN needs the right to read it")
    cause = error.__cause__ or error
    reason = f"status {status}" if status else f"{type(cause).__name__}: {cause}"
    return HubUnavailable(
        f"{subject} is {no_directory}not completely in the cache, and could not be downloaded from {endpoint}: "
        f"{reason[:300]}. Run the command again: finished files are kept. Without access, copy the Hub's cache "
        "(HF_HOME) to this machine and set HF_HUB_OFFLINE=1, or give a directory"
    )
