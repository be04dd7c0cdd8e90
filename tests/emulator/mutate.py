"""Mutation test of the kernels: plants one bug at a time and counts how many the tests on the emulator catch.

    tests/emulator/mutate.py                    all lists in mutants/
    tests/emulator/mutate.py gemm_sm90          one list
    tests/emulator/mutate.py gemm_sm90 --only 3,7
    tests/emulator/mutate.py --sample 20        20 bugs, evenly spread over all lists, after `make test`; DRAW=7 before it draws others

A mutant rebuilds only the test program of its kernel, against the emulator as it is; one in the host code of the ops or in a CPU
kernel rebuilds what it changes of the library, and its test is a pytest file (``mutated_ops.py``). Fails if fewer than 90 % are
caught, or if a miss is not explained in the list. The last line is "N of M caught".
"""

import argparse
import concurrent.futures
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mutated_ops
from mutants import Mutant

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from draw import drawn  # noqa: E402

ROOT = HERE.parents[1]
BUILD, TOOLS = ROOT / "build" / "emulator", ROOT / "tools" / "emulator"
COMPILER = os.environ.get("CXX", "c++")
# An environment's own cmake and ninja count, also where it was not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
CPU_SECONDS = 300  # a test that takes more hangs; a busy machine does not make it hang
NEEDED_SHARE = 0.9


def plant(mutant: Mutant) -> str:
    """The text of the mutant's file with the bug in it."""
    text = (ROOT / ("tools" if mutant.file.startswith("emulator/") else "csrc") / mutant.file).read_text()
    pattern = r"\s+".join(re.escape(piece) for piece in mutant.old.split())
    found = list(re.finditer(pattern, text))
    if len(found) < mutant.nth:
        sys.exit(
            f"{mutant.file} has {len(found)} times {mutant.old!r}, the list asks for number {mutant.nth}: {mutant.why}"
        )
    place = found[mutant.nth - 1]
    return text[: place.start()] + mutant.new + text[place.end() :]


def build_and_run(test: str, sources: Path, program: Path) -> tuple[str, str]:
    """("caught", the first failure), ("missed", "") or ("broken", the compiler's message)."""
    command = [COMPILER, "-std=c++20", "-O0", "-DAK_EMULATE", "-ffp-contract=off", "-w", "-I", sources, "-I", HERE]
    program_source = next(
        folder / f"{test}.cpp" for folder in (HERE, TOOLS / "tests") if (folder / f"{test}.cpp").exists()
    )
    command += [program_source, BUILD / "lib" / "libak_emulator.a", "-o", program]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        errors = [line for line in compiled.stderr.splitlines() if "error" in line]
        return "broken", (errors or ["the compiler said nothing"])[0]
    # The first failure is enough; the other cases need not run.
    run = subprocess.Popen(limited([program, "all"]), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    failure = next((line for line in run.stdout if line.startswith("FAIL")), None)
    if failure is not None:
        run.kill()
    code = run.wait()
    run.stdout.close()
    if failure is None and code == 0:
        return "missed", ""
    return "caught", failure.strip() if failure else f"the test ends with code {code}"


def limited(command: list) -> list:
    """The command with CPU_SECONDS of processor time, after which the kernel ends it."""
    return ["sh", "-c", f'ulimit -t {CPU_SECONDS}; exec "$@"', "sh", *map(str, command)]


def try_mutant(test: str, mutant: Mutant | None) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "csrc"
        shutil.copytree(ROOT / "csrc", sources)
        shutil.copytree(TOOLS, sources / "emulator")
        if mutant is not None:
            (sources / mutant.file).write_text(plant(mutant))
        if test.endswith(".py"):
            return mutated_ops.build_and_run(test, mutant and mutant.file, sources, Path(folder), limited)
        return build_and_run(test, sources, Path(folder) / "test")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="names of files in mutants/ (default: all)")
    parser.add_argument("--only", help="comma-separated numbers of the mutants to try")
    parser.add_argument("--sample", type=int, metavar="N", help="try N mutants, which DRAW chooses from all")
    parser.add_argument("--list", action="store_true", help="only check that each mutant can be planted, and name it")
    arguments = parser.parse_args()
    names = arguments.lists or sorted(p.stem for p in (HERE / "mutants").glob("*.py") if p.stem != "__init__")
    only = {int(number) for number in arguments.only.split(",")} if arguments.only else None

    mutants = {name: importlib.import_module(f"mutants.{name}") for name in names}
    for name, module in mutants.items():
        for mutant in module.MUTANTS:
            plant(mutant)  # a stale entry ends the run before it has begun
            if arguments.list:
                print(f"{name}: {mutant.why}")
    if arguments.list:
        return 0

    for command in (
        ["cmake", "-S", HERE, "-B", BUILD, "-G", "Ninja"],
        ["cmake", "--build", BUILD, "--target", "ak_emulator"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": PATH})

    jobs = []
    for name, module in mutants.items():
        chosen = [
            (f"{name} {i}", mutant.test or module.TEST, mutant)
            for i, mutant in enumerate(module.MUTANTS)
            if only is None or i in only
        ]
        if not arguments.sample:  # a sample follows `make test`, which has run the tests with nothing planted
            jobs += [(f"{name}, nothing planted", test, None) for test in dict.fromkeys(test for _, test, _ in chosen)]
        jobs += chosen
    if arguments.sample:
        jobs = drawn(jobs, arguments.sample)

    caught, total, faults = 0, 0, []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = pool.map(lambda job: try_mutant(job[1], job[2]), jobs)
        for (title, _, mutant), (outcome, detail) in zip(jobs, results, strict=True):
            if mutant is None:
                if outcome != "missed":
                    sys.exit(f"{title}: the test fails as it is: {detail}")
                continue
            total += 1
            caught += outcome == "caught"
            print(f"{outcome:6} {title}: {mutant.why}: {detail[:200] or mutant.missed or 'NOT EXPLAINED'}", flush=True)
            if outcome == "broken" or (outcome == "missed" and not mutant.missed):
                faults.append(title)
            if outcome == "caught" and mutant.missed:
                faults.append(f"{title} (explained as a miss, but it is caught)")
    if faults:
        print("to be looked at: " + ", ".join(faults))
    print(f"{caught} of {total} caught")
    return 1 if faults or caught < NEEDED_SHARE * total else 0


if __name__ == "__main__":
    sys.exit(main())
