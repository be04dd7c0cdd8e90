#!/usr/bin/env python3
"""Executes the commands of a workflow in a copy of the repository, where nothing is built, installed or published.

.ci/dry_run.py .github/workflows/release.yml

`make` names the commands of its targets and runs none; package managers and `gh` succeed and do nothing; everything else is real.
Expressions are those of a push of the tag of this version. A job runs once for each entry of its matrix.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "amp_kernels" / "_version.py").read_text())[1]
GITHUB = {
    "github.ref_name": f"v{VERSION}",
    "github.ref_type": "tag",
    "github.server_url": "https://example.org",
    "github.repository": "owner/amp_kernels",
    "github.token": "",
}
NOTHING = ("apt-get", "dnf", "gh", "pipx")
PLAYED = {
    "make": 'for argument in "$@"; do case $argument in *=*) ;; *) exec {{make}} --dry-run "$@" > /dev/null;; esac; done; exit 1',
    "python": 'case "$1 $2" in "-m pip") exit 0;; esac; exec {python} "$@"',
}


def jobs(workflow: dict) -> list[tuple[str, dict, dict]]:
    """Name, job and values of the matrix."""
    found = []
    for name, job in workflow["jobs"].items():
        for values in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
            found.append((name, job, {f"matrix.{key}": value for key, value in values.items()}))
    return found


def filled(text: str, values: dict) -> str:
    """The text with the values of its expressions. Raises KeyError for one that nobody defined."""
    return re.sub(r"\$\{\{\s*(.+?)\s*\}\}", lambda match: str(values[match[1]]), text)


def execute(path: Path, repository: Path = ROOT) -> list[str]:
    """Runs the commands; the failures, each with its job, command and output."""
    workflow = yaml.safe_load(path.read_text())
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        source, tools = Path(folder, "source"), Path(folder, "tools")
        subprocess.run(["git", "clone", "--quiet", repository, source], check=True)
        tools.mkdir()
        play(tools)
        for name, job, matrix in jobs(workflow):
            values = {**GITHUB, **matrix}
            if "publish" in name:
                (source / "dist").mkdir(exist_ok=True)
                for wheel in (f"amp_kernels-{VERSION}-x.whl", f"amp_kernels-{VERSION}+cpu-x.whl"):
                    (source / "dist" / wheel).touch()
            for step in job["steps"]:
                if "run" not in step:
                    continue
                try:
                    given = {**workflow.get("env", {}), **job.get("env", {}), **step.get("env", {})}
                    given = {key: filled(value, values) for key, value in given.items()}
                    command = filled(step["run"], values)
                except KeyError as error:
                    failures.append(f"{name}: {step['run']}: no value for {error}")
                    continue
                if "PYTHON" in given:  # the container's
                    given["PYTHON"] = str(tools / "python")
                given |= {"GITHUB_WORKSPACE": str(source), "HOME": folder}
                at = {**os.environ, **given, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", command], cwd=source, env=at, capture_output=True, text=True
                )
                if done.returncode:
                    failures.append(f"{name}: {command}: {done.stdout}{done.stderr}")
    return failures


def play(tools: Path) -> None:
    """Puts the programs that do nothing, and those that only look, into a folder."""
    real = {
        "make": subprocess.run(["which", "make"], capture_output=True, text=True).stdout.strip(),
        "python": sys.executable,
    }
    scripts = dict.fromkeys(NOTHING, "exit 0") | {name: text.format(**real) for name, text in PLAYED.items()}
    for name, script in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)


if __name__ == "__main__":
    found = execute(Path(sys.argv[1]))
    print("\n".join(found) or "every command succeeds")
    sys.exit(bool(found))
