"""Every notebook runs from top to bottom, as a reader would run it."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [n.name for n in NOTEBOOKS] == [
        "01_first_generation.ipynb",
        "02_state_as_a_value.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "notebooks are kept without outputs"
    )
    NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
