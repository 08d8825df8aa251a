"""A model folder as it lies on disk: its config.json and where each of its tensors is.

Everything is read from the headers first, so that a folder is accepted or refused as a whole before any parameter is
made. Only safetensors files are opened: a pickle can run code. With an index the index alone says which file a tensor
is taken from; other files in the folder are left alone.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxstate.errors import CheckpointError
from jaxstate.models import original
from jaxstate.models.tensors import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = ("F32", "BF16", "F16")
_FIRST = 5  # how many of many problems a message shows

_PICKLED = """model folder {folder} holds its weights as a pickle only ({names}), which is not opened: \
a pickle can run code. Convert it once, where you trust it and have torch:
  import torch
  from safetensors.torch import save_file
  weights = torch.load("{name}", map_location="cpu", weights_only=True)
  save_file({{name: tensor.clone() for name, tensor in weights.items()}}, "model.safetensors")"""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says about one of its tensors."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A readable model folder.

    Args:
      folder: where it is.
      config: its config.json in the published format, `eos_token_id` as generation is meant to use it.
      headers: one entry per tensor, by published name.
    """

    folder: pathlib.Path
    config: dict[str, Any]
    headers: dict[str, Header]

    @classmethod
    def open(cls, folder: str | pathlib.Path) -> Checkpoint:
        """Reads the config and every header.

        Raises:
          CheckpointError: no such folder, no config, unreadable JSON, missing shards (all named), a pickle in place of
            safetensors, a broken file, or an index that names tensors its files do not have.
        """
        folder = pathlib.Path(folder)
        config = read_config(folder)
        headers = _published_names(_headers(folder), folder)
        return cls(folder, config, headers)

    def check(self, wanted: Iterable[Tensor], *, tied: Mapping[str, str]) -> None:
        """Raises CheckpointError unless the files hold exactly the wanted tensors.

        Args:
          wanted: every tensor of the model.
          tied: tensors that may lie in the file beside the one they are tied to, and must then equal it.
        """
        tensors = {tensor.name: tensor for tensor in wanted}
        problems = _listed("missing", [name for name in tensors if name not in self.headers])
        extra = [name for name in self.headers if name not in tensors and name not in tied]
        problems += _listed("not part of this model", extra)
        shapes, dtypes = [], []
        for name, header in self.headers.items():
            if name in tensors and header.shape != tensors[name].shape:
                shapes.append(f"{name} is {list(header.shape)}, needed {list(tensors[name].shape)}")
            if (name in tensors or name in tied) and header.dtype not in _DTYPES:
                dtypes.append(f"{name} is {header.dtype}")
        problems += _listed("of another shape", shapes)
        problems += _listed(f"of a dtype other than {', '.join(_DTYPES)}", dtypes)
        for name, source in tied.items():
            if not problems and name in self.headers and not self._same(name, source):
                problems.append(f"{name} differs from {source}, to which config.json ties it")
        if problems:
            raise CheckpointError(f"model folder {self.folder}: tensors " + "; ".join(problems))

    def check_layers(self, layers: int) -> None:
        """Raises CheckpointError for more layers than tensors, before anybody describes a million of them."""
        if layers > len(self.headers):
            raise CheckpointError(
                f"model folder {self.folder}: {CONFIG} says num_hidden_layers {layers}, and there are"
                f" {len(self.headers)} tensors in all"
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor of that published name, as it is in the file."""
        header = self.headers[name]
        with safe_open(header.file, framework="np") as file:
            return file.get_tensor(header.name)

    def read_part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """What the slices, one an axis, cut out of that tensor; no more than that is read."""
        header = self.headers[name]
        with safe_open(header.file, framework="np") as file:
            return file.get_slice(header.name)[index]

    def dtype(self, name: str) -> str:
        """The dtype of a tensor in the file, as numpy names it."""
        return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[self.headers[name].dtype]

    def _same(self, a: str, b: str) -> bool:
        x, y = self.read(a), self.read(b)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """A model folder's config.json in the published format, whichever layout it is in.

    Raises:
      CheckpointError: no such folder, no config.json, or one that is not a JSON object.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; a model is a local folder with {CONFIG} and {WEIGHTS}, nothing is downloaded"
        )
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"model folder {folder} has no {CONFIG}")
    config = _json(folder / CONFIG)
    if original.is_original(config):
        config = original.published(config, str(folder / CONFIG))
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _json(generation).get("eos_token_id")
        config = config if eos is None else {**config, "eos_token_id": eos}
    return config


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _special_float(value: dict[str, Any]) -> Any:
    """An infinite `time_step_limit` is written as `Infinity`, which Python reads, or as `{"__float__": "Infinity"}`."""
    number = value.get("__float__") if len(value) == 1 else None
    return float(number) if isinstance(number, str) else value


def _headers(folder: pathlib.Path) -> dict[str, Header]:
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(_no_weights(folder))
    return _file_headers(folder / WEIGHTS)


def _indexed(folder: pathlib.Path) -> dict[str, Header]:
    where = _json(folder / INDEX).get("weight_map")
    if (
        not isinstance(where, dict)
        or not where
        or not all(isinstance(f, str) for f in where.values())
    ):
        raise CheckpointError(f"{folder / INDEX} has no weight_map from tensor names to file names")
    files = sorted(set(where.values()))
    strange = [name for name in files if pathlib.PurePath(name).name != name]
    if strange:
        raise CheckpointError(
            f"{folder / INDEX} names files outside its folder: {', '.join(strange)}"
        )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"model folder {folder} lacks {len(missing)} of the {len(files)} files its index names: "
            f"{', '.join(missing)}; fetch them again"
        )
    by_file = {name: _file_headers(folder / name) for name in files}
    absent = [f"{name} ({file})" for name, file in where.items() if name not in by_file[file]]
    if absent:
        problem = "; ".join(_listed("named by the index but not in their files", absent))
        raise CheckpointError(f"model folder {folder}: tensors {problem}")
    return {name: by_file[file][name] for name, file in where.items()}


def _file_headers(path: pathlib.Path) -> dict[str, Header]:
    try:
        with safe_open(path, framework="np") as file:
            found = {}
            for name in file.keys():
                part = file.get_slice(name)
                found[name] = Header(path, name, tuple(part.get_shape()), part.get_dtype())
            return found
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}; fetch it again"
        ) from error


def _no_weights(folder: pathlib.Path) -> str:
    pickles = sorted(p.name for end in ("*.bin", "*.pt", "*.pth") for p in folder.glob(end))
    if pickles:
        return _PICKLED.format(folder=folder, names=", ".join(pickles), name=pickles[0])
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    found = f"; it has {', '.join(others)} and no index" if others else ""
    return f"model folder {folder} has neither {WEIGHTS} nor {INDEX}{found}"


def _published_names(headers: dict[str, Header], folder: pathlib.Path) -> dict[str, Header]:
    """The first layout's one name of its own, replaced."""
    out: dict[str, Header] = {}
    for name, header in headers.items():
        published = name.replace("backbone.embedding.", "backbone.embeddings.")
        if published in out or (published != name and published in headers):
            raise CheckpointError(
                f"model folder {folder}: {published} is there twice, also as {name}"
            )
        out[published] = header
    return out


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _FIRST} more" if len(names) > _FIRST else ""
    return [f"{what} ({len(names)}): {', '.join(names[:_FIRST])}{more}"]
