"""The notebook: as it lies there, and run from top to bottom on this machine."""

import base64
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "launch" / "colab" / "ssd_demo.ipynb"
SECONDS = 900


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_valid_and_holds_no_output_of_a_run(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_the_notebooks_picture_is_that_of_the_readme(notebook):
    picture = notebook.cells[0].attachments["timeline.svg"]["image/svg+xml"]
    assert base64.b64decode(picture) == (ROOT / "docs" / "figures" / "timeline.svg").read_bytes()
    assert "(attachment:timeline.svg)" in notebook.cells[0].source


@pytest.mark.parametrize(
    ("installed", "package", "taken"),
    [
        (sys.path, "ssd_jax", None),
        ([], "ssd_jax", "."),
        ([], "ssd_jax/ssd_jax", "ssd_jax"),
    ],
    ids=["installed", "in a checkout", "beside the clone"],
)
def test_a_folder_is_no_installation(notebook, tmp_path, monkeypatch, installed, package, taken):
    (tmp_path / package).mkdir(parents=True)
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / "ssd_jax.egg-info").mkdir()  # of an environment that is not the notebook's
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *installed])
    run = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: run.append(command))
    install = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    exec(install.partition("import jax")[0], {})
    assert [command[-1].partition("[")[0] for command in run] == (
        [] if taken is None else [str(tmp_path / taken)]
    )


def installs(notebook, given):
    """Runs the first cell up to its imports, with this filled in."""
    install = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    install = install.replace('INSTALL_FROM = ""', f'INSTALL_FROM = "{given}"', 1)
    exec(install.partition("import jax")[0], {})


@pytest.mark.parametrize(
    ("given", "commands"),
    [
        ("ssd_jax-9.whl", ["pip ssd_jax-9.whl"]),
        ("https://host/ssd_jax.git", ["git https://host/ssd_jax.git", "pip HERE/ssd_jax"]),
    ],
)
def test_outside_a_checkout_the_notebook_installs_what_is_filled_in(
    notebook, tmp_path, monkeypatch, given, commands
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    run = []

    def record(command, check):
        what = command[-1].partition("[")[0] if "pip" in command else command[3]
        run.append(f"{'pip' if 'pip' in command else 'git'} {what}".replace(str(tmp_path), "HERE"))

    monkeypatch.setattr(subprocess, "run", record)
    installs(notebook, given)
    assert run == commands


def test_outside_a_checkout_the_notebook_says_what_to_fill_in(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SystemExit, match="fill in INSTALL_FROM"):
        installs(notebook, "")


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(notebook, tmp_path):
    client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": tmp_path}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in code]
    assert "mode auto takes" in printed[1]
    assert "All three are the same, 128 tokens." in printed[2]
    table = [line.split() for line in printed[3].splitlines()[1:]]
    assert [row[0] for row in table] == ["ar", "sd", "ssd"]
    assert all(float(row[1]) > 0 for row in table)
    assert 0 < float(table[2][3]) <= 1  # hit rate
    assert "SSD pays here" in printed[4] or "SSD is not worth it here" in printed[4]
    pictures = [out for cell in code for out in cell.outputs if "image/png" in out.get("data", {})]
    assert "tokens a round, hit rate" in printed[5]
    assert printed[6].startswith("ssd k=4, rounds ")
    assert len(pictures) == 3
