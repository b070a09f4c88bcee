"""Runs the targets of `targets.py`. In all, the exit code is 0 if nothing but clean errors was found.

    run.py fuzz [--seconds N] [--seed N] [TARGET ...]   coverage-guided, with atheris; ends with a table
    run.py random COUNT SEED TARGET ...                 random mutations of the corpus, without atheris; prints JSON
    run.py bundles FIRST COUNT                          random corruptions of a bundle, a seed each; prints JSON
    run.py replay TARGET FILE ...                       the inputs of findings once more; prints tracebacks
    run.py corpus                                       writes the corpus anew, as `seeds.py` makes it

Inputs that make findings are kept in `build/fuzz/TARGET`, each as short as it could be made, with its traceback.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("fuzz", "ir", "support", "loader")]

if TYPE_CHECKING:
    from bounds import Finding
    from targets import Target

CORPUS = TESTS / "fuzz" / "corpus"
KEPT = TESTS.parent / "build" / "fuzz"
INSTRUMENTED_SECONDS = 5.0
"""The bound on an input's time while coverage is recorded, which makes Python a few times slower."""
MAX_BYTES = 16384
"""The longest input that is tried: more than twice the largest of the corpus."""
SHORTENING_TRIES = 500
_STATUS = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)")


class Row(NamedTuple):
    """A target's line in the table at the end."""

    target: str
    executions: int
    coverage: int
    features: int
    findings: int


# --- a target --------------------------------------------------------------------------------------------------


class Search:
    """Looks for findings of one target in a folder of its own, and keeps one input for each cause."""

    def __init__(self, name: str, folder: Path, seconds: float | None = None) -> None:
        import bounds
        import targets

        self.target: Target = targets.TARGETS[name]
        self.found: dict[str, Finding] = {}
        self._attempt, self._finding = targets.attempt, bounds.finding
        self._kept, self._folder = KEPT / name, folder / "case"
        self._seconds = bounds.SECONDS if seconds is None else seconds

    def seeds(self) -> list[Path]:
        """The files of the target's corpus."""
        return sorted((CORPUS / self.target.corpus).iterdir())

    def warm_up(self) -> dict[str, str]:
        """Read the corpus without bounds, so that what is imported on first use is there. What was refused, and why."""
        from bounds import CLEAN

        refused = {}
        for seed in self.seeds():
            try:
                self._attempt(self.target, seed.read_bytes(), self._folder)
            except CLEAN as error:
                refused[seed.name] = getattr(error, "code", str(error))
        gc.freeze()  # to look through what was imported takes a good part of the time that an input may take
        return refused

    def look(self, data: bytes) -> Finding | None:
        """What the target makes of the bytes, within the bounds."""
        return self._finding(lambda: self._attempt(self.target, data, self._folder), self._seconds)

    def try_aloud(self, data: bytes) -> None:
        """As `try_input`; the input stands in the file `last` meanwhile, for those that end the process."""
        self._kept.mkdir(parents=True, exist_ok=True)
        last = self._kept / "last"
        last.write_bytes(data)
        self.try_input(data)
        last.unlink()

    def try_input(self, data: bytes) -> None:
        """Look, and keep a finding of a new cause."""
        found = self.look(data)
        if found is None or found.key in self.found:
            return
        self.found[found.key] = found
        shortest = self._shortened(data, found.key)
        self._kept.mkdir(parents=True, exist_ok=True)
        (self._kept / found.name).write_bytes(shortest)
        (self._kept / f"{found.name}.txt").write_text(f"{found.key}\n\n{found.report}", encoding="utf-8")

    def _shortened(self, data: bytes, key: str) -> bytes:
        """The bytes with all left out that the finding doesn't need, as far as some hundred tries lead."""
        size, tries = len(data) // 2, 0
        while size:
            start = 0
            while start < len(data) and tries < SHORTENING_TRIES:
                shorter = data[:start] + data[start + size :]
                tries += 1
                found = self.look(shorter)
                if found is not None and found.key == key:
                    data = shorter
                else:
                    start += size
            size //= 2
        return data


def random_mutations(names: list[str], count: int, seed: int) -> int:
    """Of each target the corpus, and `count` random mutations of it; what was found as JSON."""
    from mutate import FORMS

    reports = {}
    for name in names:
        rng = random.Random(f"{name} {seed}")
        with tempfile.TemporaryDirectory() as folder:
            search = Search(name, Path(folder))
            refused = search.warm_up()
            inputs = [file.read_bytes() for file in search.seeds()]
            for data in inputs:
                search.try_aloud(data)
            for _ in range(count):
                change = FORMS["bytes" if rng.random() < 0.2 else search.target.form]
                search.try_aloud(change(rng.choice(inputs), rng))
        findings = {found.name: found.report for found in search.found.values()}
        reports[name] = {"tried": len(inputs) + count, "refused": refused, "findings": findings}
    print(json.dumps(reports))
    return any(report["findings"] for report in reports.values())


def replay(name: str, files: list[str]) -> int:
    """The findings that these inputs make."""
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        search = Search(name, Path(folder))
        search.warm_up()
        for file in files:
            found = search.look(Path(file).read_bytes())
            print(f"{file}: {found.report if found else 'clean'}")
            code |= found is not None
    return code


def bundles(first: int, count: int) -> int:
    """Random corruptions of a bundle; how often each outcome came, and the seeds of findings, as JSON."""
    import bounds
    import corruptions

    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        original = corruptions.write_original(Path(folder) / "original")
        for seed in range(first, first + count):
            found = bounds.finding(lambda seed=seed: outcomes.update([corruptions.attempt(seed, original)]))
            if found is not None:
                failures.append(f"seed {seed}: {found.report}"[-2000:])
            if (seed - first + 1) % 10_000 == 0:
                print(f"{seed - first + 1} of {count}: {len(failures)} findings", file=sys.stderr, flush=True)
    print(json.dumps({"outcomes": outcomes, "failures": failures}))
    return bool(failures)


# --- coverage-guided -------------------------------------------------------------------------------------------


def guided(name: str, seconds: int, seed: int) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with tempfile.TemporaryDirectory() as folder:
        with atheris.instrument_imports(include=["precast", "graph_text", "graph_lexer"]):
            from mutate import FORMS

            search = Search(name, Path(folder), INSTRUMENTED_SECONDS)
            search.warm_up()
        change: Callable[[bytes, random.Random], bytes] = FORMS[search.target.form]

        def mutate(data: bytes, max_size: int, state: int) -> bytes:
            rng = random.Random(state)
            changed: bytes = change(data, rng) if rng.random() < 0.5 else atheris.Mutate(data, len(data) + 64)
            return changed[:max_size]

        grown = KEPT / "corpus" / name
        grown.mkdir(parents=True, exist_ok=True)
        (KEPT / name).mkdir(parents=True, exist_ok=True)
        options = {
            "max_total_time": seconds, "seed": seed, "max_len": MAX_BYTES, "timeout": 120, "rss_limit_mb": 4096,
            "artifact_prefix": f"{KEPT / name}/", "print_final_stats": 1,
        }  # fmt: skip
        arguments = [f"-{option}={value}" for option, value in options.items()]
        corpora = [str(grown), str(CORPUS / search.target.corpus)]
        atheris.Setup([sys.argv[0], *arguments, *corpora], search.try_input, custom_mutator=mutate)
        atheris.Fuzz()


def fuzz(names: list[str], seconds: int, seed: int) -> int:
    """Fuzz the targets one after the other, each for its share of the time; a table of what came of it."""
    from targets import TARGETS

    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise SystemExit(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    names = names or list(TARGETS)
    rows = [_fuzzed(name, max(1, seconds // len(names)), seed) for name in names]
    print(f"\n{'target':20} {'executions':>10} {'coverage':>9} {'features':>9} {'findings':>9}")
    for row in rows:
        print(f"{row.target:20} {row.executions:10} {row.coverage:9} {row.features:9} {row.findings:9}")
    found = sum(row.findings for row in rows)
    print(f"\n{found} findings" + (f": their inputs and tracebacks are in {KEPT}" if found else ""))
    return bool(found)


def _fuzzed(name: str, seconds: int, seed: int) -> Row:
    started = time.time()
    print(f"{name}: {seconds} s", flush=True)
    (KEPT / name).mkdir(parents=True, exist_ok=True)
    log = KEPT / f"{name}.log"
    with log.open("wb") as file:
        command = [sys.executable, __file__, "guided", name, str(seconds), str(seed)]
        ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    status = [tuple(map(int, found)) for found in _STATUS.findall(log.read_text(encoding="utf-8", errors="replace"))]
    executions, coverage, features = status[-1] if status else (0, 0, 0)
    # A traceback of ours, or an input that libFuzzer wrote when the process ended.
    ends = ("crash-", "timeout-", "oom-")
    kept = [file for file in (KEPT / name).iterdir() if file.suffix == ".txt" or file.name.startswith(ends)]
    kept = [file for file in kept if file.stat().st_mtime >= started - 1]
    if ended and not kept:
        print(f"{name}: ended with {ended}; see {log}", flush=True)
    return Row(name, executions, coverage, features, len(kept) or int(ended != 0))


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("fuzz")
    verb.add_argument("names", nargs="*", metavar="TARGET")
    verb.add_argument("--seconds", type=int, default=3600)
    verb.add_argument("--seed", type=int, default=1)
    verb = verbs.add_parser("guided")
    verb.add_argument("name", metavar="TARGET")
    verb.add_argument("seconds", type=int)
    verb.add_argument("seed", type=int)
    verb = verbs.add_parser("random")
    verb.add_argument("count", type=int)
    verb.add_argument("seed", type=int)
    verb.add_argument("names", nargs="+", metavar="TARGET")
    verb = verbs.add_parser("bundles")
    verb.add_argument("first", type=int)
    verb.add_argument("count", type=int)
    verb = verbs.add_parser("replay")
    verb.add_argument("name", metavar="TARGET")
    verb.add_argument("files", nargs="+", metavar="FILE")
    verbs.add_parser("corpus")
    given = parser.parse_args()
    # transformers has much to say of odd configs, and would ask the hub for what they name.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "RUST_BACKTRACE": "0"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.simplefilter("ignore")
    if given.verb == "fuzz":
        return fuzz(given.names, given.seconds, given.seed)
    if given.verb == "guided":
        guided(given.name, given.seconds, given.seed)
        return 0
    if given.verb == "random":
        return random_mutations(given.names, given.count, given.seed)
    if given.verb == "bundles":
        return bundles(given.first, given.count)
    if given.verb == "replay":
        return replay(given.name, given.files)
    import seeds

    seeds.write(CORPUS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
