"""Mutation test of the kernels: plants one bug at a time and counts how many the tests on the emulator catch.

    tests/emulator/mutate.py                         all traps, and 12 places of each family that DRAW chooses
    tests/emulator/mutate.py norm loss --each 30     of two families (families.py); --each 0: their traps alone
    tests/emulator/mutate.py norm --at forward.cu:123   those of one line, or whose title has this text
    tests/emulator/mutate.py --sample 18             so many bugs of all families, a third of them traps

Operators (operators.py) find their places in the text; traps (traps/) are bugs that no operator makes. A mutant rebuilds only the test
program of its kernel, against the emulator as it is; one in the host code of the ops or in a CPU kernel rebuilds what it changes of
the library, and its test is a pytest file (mutated_ops.py). A change of an operator that does not compile, or that leaves the object
code as it was, is no bug: the next place is drawn. Fails if a trap is missed, or if fewer than 90 % of the
operators' bugs are caught, beyond chance. The last line is "N of M caught".
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mutated_ops
from families import CHANGE_NOTHING, FAMILIES, family_of, sources, tests_of
from operators import NO_PLACES, OPERATORS
from traps import every

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from draw import drawn  # noqa: E402
from planting import Place, in_turns, places, too_few  # noqa: E402

ROOT = HERE.parents[1]
BUILD, TOOLS = ROOT / "build" / "emulator", ROOT / "tools"
COMPILE = [os.environ.get("CXX", "c++"), "-std=c++20", "-DAK_EMULATE", "-ffp-contract=off", "-w"]
# An environment's own cmake and ninja count, also where it was not activated.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Of a program's sample and of all its cases: what takes longer hangs, on a busy machine too.
CPU_SECONDS = {"": 60, "all": 300}


@dataclass(frozen=True)
class Mutant:
    family: str
    title: str
    file: str
    text: str  # of the file, with the bug
    tests: list[str]


@cache
def read(file: str) -> str:
    return (ROOT / "csrc" / file).read_text()


@cache
def every_place(file: str) -> list[Place]:
    return places(file, read(file), OPERATORS, NO_PLACES)


def traps_of(family: str) -> list[Mutant]:
    found = [trap for trap in every() if family_of(trap.file) == family]
    return [
        Mutant(
            family,
            f"{t.file}: {t.why}",
            t.file,
            t.place(read(t.file)).planted(read(t.file)),
            t.tests or tests_of(t.file),
        )
        for t in found
    ]


def places_of(family: str) -> list[Place]:
    """Those of the family's operators, in the order in which they are drawn."""
    found = [place for file in sources(family) for place in every_place(file)]
    return in_turns(place for place in found if (place.file, place.line(read(place.file))) not in CHANGE_NOTHING)


def of_place(family: str, place: Place) -> Mutant:
    text = read(place.file)
    number = text.count("\n", 0, place.begin) + 1
    title = f"{place.file}:{number}: {place.operator}: {place.line(text)}"
    return Mutant(family, title, place.file, place.planted(text), tests_of(place.file))


def limited(command: list, seconds: int) -> list:
    """The command with so much processor time, after which the kernel ends it."""
    return ["sh", "-c", f'ulimit -t {seconds}; exec "$@"', "sh", *map(str, command)]


def compiled(test: str, sources: list[Path], output: Path, *options: str) -> str:
    """ "" or the compiler's message."""
    program = next(
        folder / f"{test}.cpp" for folder in (HERE, TOOLS / "emulator/tests") if (folder / f"{test}.cpp").exists()
    )
    folders = [f"-I{folder}" for folder in (*sources, ROOT / "csrc", TOOLS, HERE)]
    command = [*COMPILE, *options, *folders, program, "-o", output]
    if "-c" not in options:
        command.insert(-2, BUILD / "lib" / "libak_emulator.a")
    step = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in step.stderr.splitlines() if "error" in line] or ["the compiler said nothing"]
    return errors[0] if step.returncode else ""


def same_code(mutant: Mutant) -> bool:
    """True if the change leaves no trace in the optimised object code of the programs and libraries that must notice it."""
    with tempfile.TemporaryDirectory() as folder:
        changed = plant(mutant, Path(folder))
        objects = [changed / "with.o", changed / "without.o"]
        for test in mutant.tests:
            if test.endswith(".py"):
                if not mutated_ops.same_code(test, mutant.file, changed):
                    return False
                continue
            for output, sources in zip(objects, ([changed], []), strict=True):
                compiled(test, sources, output, "-O1", "-c")
            if objects[0].read_bytes() != objects[1].read_bytes():
                return False
    return True


def build_and_run(test: str, changed: Path) -> tuple[str, str]:
    """("caught", the first failure), ("missed", "") or ("broken", the compiler's message)."""
    program = changed / "test"
    if message := compiled(test, [changed], program, "-O0"):
        return "broken", message
    for cases, seconds in CPU_SECONDS.items():  # a sample first: one schedule of each case
        # The first failure is enough; the other cases need not run.
        command = limited([program, *cases.split()], seconds)
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        failure = next((line for line in run.stdout if line.startswith("FAIL")), None)
        if failure is not None:
            run.kill()
        code = run.wait()
        run.stdout.close()
        if failure is not None or code != 0:
            return "caught", failure.strip() if failure else f"the test ends with code {code}"
    return "missed", ""


def plant(mutant: Mutant, folder: Path) -> Path:
    """A folder that the compiler looks into first, with the changed file."""
    file = folder / mutant.file
    file.parent.mkdir(parents=True)
    file.write_text(mutant.text)
    return folder


def try_mutant(mutant: Mutant | None, tests: list[str]) -> tuple[str, str]:
    """The outcome of the first test that notices the bug, or of the last. The pytest files of a folder are one test."""
    rooms: dict[str, list[str]] = {}
    for test in tests:
        rooms.setdefault(test.split("/")[0] if test.endswith(".py") else test, []).append(test)
    outcome, detail = "missed", ""
    for test, files in rooms.items():
        with tempfile.TemporaryDirectory() as folder:
            changed = plant(mutant, Path(folder)) if mutant else Path(folder)
            if test == files[0]:
                outcome, detail = build_and_run(test, changed)
            else:
                outcome, detail = mutated_ops.build_and_run(files, mutant and mutant.file, changed, limited)
        if outcome != "missed":
            break
    return outcome, detail


def check_texts() -> None:
    """Every trap can be planted, no operator makes it, and every change that is explained is one that an operator makes."""
    stale = []
    for file, line in CHANGE_NOTHING:
        if not any(place.line(read(file)) == line for place in every_place(file)):
            stale.append(f"{file}: no operator makes {line!r}")
    for trap in every():
        text = read(trap.file)
        change = trap.place(text).change(text)
        if family_of(trap.file) is None:
            stale.append(f"{trap.file} belongs to no family: {trap.why}")
        elif any(place.change(text) == change for place in every_place(trap.file)):
            stale.append(f"{trap.file}: an operator makes the trap {trap.why!r}")
    if stale:
        sys.exit("\n".join(stale))


class Report:
    """The outcomes of the bugs, printed as they come."""

    def __init__(self):
        self.caught, self.total, self.faults = Counter(), Counter(), []

    def trap(self, mutant: Mutant) -> None:
        outcome, detail = try_mutant(mutant, mutant.tests)
        self.tell("trap", mutant, outcome, detail)
        if outcome != "caught":
            self.faults.append(mutant.title)

    def operators(self, family: str, count: int, at: str) -> None:
        """So many bugs of a family; others take the place of those that are none."""
        for place in places_of(family):
            mutant = of_place(family, place)
            if at in mutant.title and count > 0:
                outcome, detail = try_mutant(mutant, mutant.tests)
                if outcome == "caught" or (outcome == "missed" and not same_code(mutant)):
                    count -= 1
                    self.tell("operator", mutant, outcome, detail)

    def tell(self, kind: str, mutant: Mutant, outcome: str, detail: str) -> None:
        self.total[kind] += 1
        self.caught[kind] += outcome == "caught"
        print(f"{outcome} {mutant.family} {mutant.title}: {detail[:200]}", flush=True)

    def failed(self) -> bool:
        if self.faults:
            print("to be looked at: " + ", ".join(self.faults))
        print(f"{self.caught.total()} of {self.total.total()} caught")
        return bool(self.faults) or too_few(self.caught["operator"], self.total["operator"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names in families.py (default: all)")
    parser.add_argument("--each", type=int, default=12, metavar="N", help="places of the operators in each family")
    parser.add_argument(
        "--at", default="", metavar="TEXT", help="only bugs whose title, as a run prints it, has this text"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="N bugs, which DRAW chooses from all")
    parser.add_argument("--list", action="store_true", help="only check the traps' texts, and count the places")
    arguments = parser.parse_args()
    families = arguments.families or list(FAMILIES)
    check_texts()
    if arguments.list:
        for family in families:
            print(f"{family}: {len(traps_of(family))} traps, {len(places_of(family))} places")
        return 0

    for command in (
        ["cmake", "-S", HERE, "-B", BUILD, "-G", "Ninja"],
        ["cmake", "--build", BUILD, "--target", "ak_emulator"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": PATH})

    traps = [trap for family in families for trap in traps_of(family) if arguments.at in trap.title]
    counts = dict.fromkeys(families, arguments.each)
    if arguments.sample:
        traps = drawn(traps, arguments.sample // 3)
        counts = dict.fromkeys(drawn(families, arguments.sample - len(traps)), 1)
    report = Report()
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        if not arguments.sample:  # a sample follows `make test`, which has run the tests with nothing planted
            tests = {test for family in families for test in FAMILIES[family][1].split()}
            for test, (outcome, detail) in zip(
                tests, pool.map(lambda test: try_mutant(None, [test]), tests), strict=True
            ):
                if outcome != "missed":
                    sys.exit(f"{test} fails with nothing planted: {detail}")
        jobs = [pool.submit(report.trap, trap) for trap in traps]
        jobs += [pool.submit(report.operators, family, count, arguments.at) for family, count in counts.items()]
        for job in jobs:
            job.result()
    return report.failed()


if __name__ == "__main__":
    sys.exit(main())
