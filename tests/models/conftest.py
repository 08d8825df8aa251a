"""Model folders to break."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from .driver import FIXTURES


class Folder:
    """A model folder that can be taken apart: `config` and `weights` are changed, then `write` puts them back."""

    def __init__(self, path, variant):
        self.path = path
        path.mkdir(parents=True)
        self.config = json.loads((FIXTURES / variant / "config.json").read_text())
        self.weights = load_file(FIXTURES / variant / "model.safetensors")

    def write(self):
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(
            {k: np.ascontiguousarray(v) for k, v in self.weights.items()},
            self.path / "model.safetensors",
        )
        return self.path

    def write_shards(self, count=3):
        """The same weights dealt over several files, with their index."""
        (self.path / "config.json").write_text(json.dumps(self.config))
        names, where = sorted(self.weights), {}
        for i in range(count):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            mine = names[i::count]
            save_file({name: self.weights[name] for name in mine}, self.path / file)
            where |= dict.fromkeys(mine, file)
        self.write_index(where)
        return where

    def write_index(self, where):
        index = {"metadata": {}, "weight_map": where}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path):
    def make(variant="mamba2"):
        return Folder(tmp_path / variant, variant)

    yield make
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def bfloat16_folder(folder):
    """A folder whose matrices are bfloat16 and whose recurrence parameters are float32, as many published ones."""
    made = folder("mamba2_groups")
    made.weights = {
        name: value
        if name.endswith(("A_log", ".D", "dt_bias"))
        else value.astype(ml_dtypes.bfloat16)
        for name, value in made.weights.items()
    }
    made.config["dtype"] = "bfloat16"
    return made.write()
