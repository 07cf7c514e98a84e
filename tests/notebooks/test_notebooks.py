"""The notebooks run from top to bottom, as they are committed: without outputs, each a short story."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_CELLS = 16
# Cells take seconds; on a new machine the first one also waits for kernels to be compiled. Sockets in a folder of their
# own need no free port.
PROGRAM = """
import sys, nbformat
from nbclient import NotebookClient
from traitlets.config import Config

source, target, socket = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
config = Config({"KernelManager": {"transport": "ipc", "ip": socket}})
NotebookClient(notebook, kernel_name="python3", timeout=300, config=config).execute()
nbformat.write(notebook, target)
"""


def _outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Give everything that a notebook's code has shown."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_there_are_notebooks() -> None:
    """The three stories that the README names are there."""
    assert [path.name for path in NOTEBOOKS] == ["01_first_replay.ipynb", "02_read_a_trace.ipynb", "03_ablation.ipynb"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"(notebooks/{path.name})" not in readme] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_bare(path: Path) -> None:
    """A committed notebook is valid, short, and carries no outputs that would grow old beside the code."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert len(notebook.cells) <= MOST_CELLS
    assert _outputs(notebook) == []
    assert {cell.execution_count for cell in notebook.cells if cell.cell_type == "code"} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """Every cell runs without an error or a warning, shows a picture on the way, and leaves nothing behind."""
    before = sorted((ROOT / "notebooks").iterdir())
    # A process of its own: the client's sockets are closed by its end, which warnings here would take for a leak.
    words = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "run.ipynb"), str(tmp_path / "socket")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=path.parent, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = _outputs(nbformat.read(tmp_path / "run.ipynb", as_version=4))
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert [output.text for output in shown if output.get("name") == "stderr"] == []
    assert sorted((ROOT / "notebooks").iterdir()) == before


def _environment() -> dict[str, str]:
    """Give the process's environment, with this very package first."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
