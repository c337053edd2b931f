"""transformers' model manager, for a server that may have one model: which models it has, and which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from huggingface_hub import CacheNotFound
from huggingface_hub.errors import HFValidationError
from transformers.cli.serving import utils as their_utils
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import split_model_id
from transformers.utils.hub import cached_file

from ..errors import ArgumentError


class UnknownModelError(ArgumentError):
    """The server has no model of this name."""


class RowModelManager(ModelManager):  # type: ignore[misc, unused-ignore]
    """Loads models. A server that was started with a model loads no other one, whatever clients ask for."""

    def __init__(self, **options: Any) -> None:
        if options.get("force_model") is not None:
            check_model(options["force_model"])
        super().__init__(**options)

    def load_model_and_processor(
        self,
        model_id_and_revision: str,
        progress_callback: Callable[..., Any] | None = None,
        tqdm_class: type | None = None,
        gguf_file: str | None = None,
    ) -> Any:
        """Loads a model, or returns one that is loaded: see `ModelManager.load_model_and_processor`.

        Raises:
            UnknownModelError: it is another one than the server was started with, or would have to be fetched while
                requests wait.
        """
        key = model_id_and_revision if gguf_file is None else f"{model_id_and_revision}:{gguf_file}"
        if self.force_model is not None:
            repository, file = split_model_id(self.force_model)
            if (model_id_and_revision, gguf_file) != (self.process_model_name(repository), file):
                raise UnknownModelError(f"asked for model={key!r}; this server has {self.force_model!r}")
        elif progress_callback is None and key not in self.loaded_models:  # /load_model has one, and may fetch
            known_model(key, self)
        return super().load_model_and_processor(
            model_id_and_revision, progress_callback, tqdm_class, gguf_file=gguf_file
        )

    def get_gen_models(  # type: ignore[override, unused-ignore]
        self, cache_dir: str | None = None
    ) -> list[dict[str, Any]]:
        """Models for `/v1/models`: the one that the server was started with, or those of the hub's cache and those that
        are loaded. From transformers 5.24 on `list_models` does that."""
        if self.force_model is not None:
            return [_listed(self.force_model)]
        try:
            models = list(ModelManager.get_gen_models(cache_dir))
        except CacheNotFound:
            models = []
        known = {model["id"] for model in models}
        loaded = [name.replace("@main", "") for name in list(self.loaded_models)]
        return models + [_listed(name) for name in loaded if name not in known]


def _listed(name: str) -> dict[str, Any]:
    """A model as `/v1/models` lists it; 0 stands for an unknown time."""
    return {"id": name, "object": "model", "owned_by": "", "created": 0}


def split_name(model: Any) -> tuple[str, str | None]:
    """transformers' `split_model_id`, of what clients send.

    Raises:
        ArgumentError: it is no name.
    """
    if not isinstance(model, str):
        raise ArgumentError(f"got model={model!r}; give a name, a string")
    name, file = split_model_id(model)
    return name, file


def check_model(asked: str) -> None:
    """Raises `UnknownModelError` where there is no such model, neither in a folder nor on the hub."""
    repository, file = split_model_id(asked)
    name, revision = split_revision(ModelManager.process_model_name(repository))
    reason = ""
    try:
        found = cached_file(name, file or "config.json", revision=revision)
    except OSError as error:
        is_name = not isinstance(error.__cause__, HFValidationError)
        found, reason = None, str(error).splitlines()[0] if is_name else ""
    if found is None:
        what = file or "config.json"
        raise UnknownModelError(
            f"asked to serve {asked!r}, and found no {what} there. A model is a folder with that file, or a repository "
            f"on the hub{reason and f' ({reason})'}"
        )


def known_model(asked: str | None, models: ModelManager) -> str:
    """The model that a request is for, where it is there: what has to be fetched would keep all requests waiting.

    Raises:
        ArgumentError: it names none, and the server has not just one.
        UnknownModelError: it is not there.
    """
    pinned, name_of = models.force_model, models.process_model_name
    if pinned is not None:
        if asked is None or name_of(asked) == name_of(pinned):
            return pinned
        raise UnknownModelError(f"asked for model={asked!r}; this server has {pinned!r}")
    if asked is None:
        raise ArgumentError("got no model; this server was started without one, so that each request names its own")
    repository, file = split_model_id(asked)
    name, revision = split_revision(name_of(repository))
    try:
        found = cached_file(name, file or "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):  # a name that no file can have is a ValueError
        found = None
    if found is None:
        raise UnknownModelError(
            f"asked for model={asked!r}, which is not on this machine; POST /load_model with its name fetches it"
        )
    return asked


def split_revision(name: str) -> tuple[str, str | None]:
    """A model's name as its server has it, and the revision; since transformers 5.24 folders have none."""
    split: Any = getattr(their_utils, "split_revision", None)
    if split is not None:
        model, revision = split(name)
    else:
        model, revision = name.split("@", 1)
    return model, revision
