"""The notebooks run, in their small mode, and are stored as a reader should find them."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, real_pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("CACTUS_HF_SMALL", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more threads than free cores wait for each other
    notebook = read(name)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("cactus-hf" in output.get("data", {}).get("text/html", "") for output in outputs), "`show` has shown"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_ready_for_colab(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.accelerator == "GPU" and notebook.metadata.colab.gpuType == "T4"
    assert f"/blob/main/notebooks/{name}.ipynb" in notebook.cells[0].source, "the badge opens this notebook"
    (install,) = (cell for cell in notebook.cells if "%pip install" in cell.source)
    assert install.metadata.tags == ["skip-execution"]


def test_one_output_is_kept() -> None:
    kept = [
        (name, cell)
        for name in NAMES
        for cell in read(name).cells
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count)
    ]
    ((name, cell),) = kept
    assert name == "quick_start" and cell.metadata.tags == ["keep-output"]
    assert len(json.dumps(cell)) < 10_000
