"""The workflows, the pre-commit configuration and the packaging metadata agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def load(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_names_versions_and_permissions(path: Path) -> None:
    workflow = load(path)
    assert True in workflow  # YAML reads the key `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job.get("steps", []):
            assert "uses" in step or "run" in step
            assert "@" in step.get("uses", "@"), step
        called = job.get("uses")
        assert called is None or (ROOT / called).is_file()


def test_all_supported_python_versions_are_tested() -> None:
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    matrix = load(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == declared
    assert f'requires-python = ">={declared[0]}"' in PROJECT
    systems = {*matrix["os"], *(entry["os"] for entry in matrix["include"])}
    assert {system.partition("-")[0] for system in systems} == {"ubuntu", "macos", "windows"}


def test_only_the_publishing_job_can_publish() -> None:
    jobs = load(ROOT / ".github/workflows/release.yml")["jobs"]
    trusted = {name for name, job in jobs.items() if job.get("permissions", {}).get("id-token") == "write"}
    assert trusted == {"publish"}
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["needs"] == "wheels"
    assert jobs["wheels"]["needs"] == "version"


def test_pre_commit_uses_the_pinned_ruff() -> None:
    hooks = load(ROOT / ".pre-commit-config.yaml")["repos"]
    (ruff,) = [repository["rev"] for repository in hooks if "ruff" in repository["repo"]]
    assert f"ruff=={ruff.removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.slow
def test_workflows_follow_the_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is missing: make test-slow installs it")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    checked = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
