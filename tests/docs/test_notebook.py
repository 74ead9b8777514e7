"""The notebook runs from top to bottom on a CPU, and is stored without outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


def test_it_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    source = str(Path(__file__).parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    results = [out for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "execute_result"]
    texts = [out.data["text/plain"] for out in results]
    assert "'steps': 6" in texts[0] and "'final_acc'" in texts[0]
    assert "report.html" in texts[1] and "metrics.jsonl" in texts[1]
    assert texts[2].strip("'").strip()  # the trained model answers
