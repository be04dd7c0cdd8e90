"""The workflows' commands, executed in a copy of the repository in which nothing is built or published."""

import re
import subprocess

import pytest

from .test_wheels import ROOT, program

yaml = pytest.importorskip("yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
dry_run = program("dry_run")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_succeeds(path):
    assert dry_run.execute(path) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_names_its_version_and_every_job_ends(path):
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))
        assert "timeout-minutes" in job or "publish" in name


def test_only_a_tag_publishes():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    writing = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"publish", "publish-site"}
    assert all(jobs[name]["if"] == "github.ref_type == 'tag'" for name in writing)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("make no-such-target", "No rule to make target"),
        (".ci/no-such-program", "No such file"),
        ('echo "${{ matrix.absent }}"', "no value for 'matrix.absent'"),
        ("rm no-such-file", "No such file"),
    ],
)
def test_a_command_that_cannot_work_is_found(tmp_path, command, said):
    workflow = {"jobs": {"job": {"steps": [{"run": "true"}, {"run": command}]}}}
    path = tmp_path / "workflow.yml"
    path.write_text(yaml.safe_dump(workflow))
    small = tmp_path / "repository"
    small.mkdir()
    (small / "Makefile").write_text("all:\n")
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a"],
    ):
        subprocess.run(["git", *arguments], cwd=small, check=True)
    (failure,) = dry_run.execute(path, small)
    assert said in failure
