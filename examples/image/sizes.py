"""How large the images are, without Docker: what `pip install` brings into each, and what Debian's packages take.

    python examples/image/sizes.py [NAME ...]

Installs this tree and what it depends on into temporary folders, counts bytes, and writes
`benchmarks/results/image.json`, from which `benchmarks/figures.py` makes the table of README.md here. Files of Python
are counted with their compiled forms, as the images have them. Debian's packages are those that this machine has: where
it has none, they are left out.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "image.json"
IMAGES = {"without torch": "", "without torch, with cuBLASLt": "[driver]", "with torch": "[torch]"}
LEFT_OUT = ("libcublas.so.", "libnvblas.so.")
"""Of NVIDIA's package, what the image without torch leaves out."""
PYTHON = (
    "python3", "python3-minimal", "python3.11", "python3.11-minimal", "libpython3-stdlib", "libpython3.11-minimal",
    "libpython3.11-stdlib",
)  # fmt: skip
GOAL_BYTES = 400 * 10**6
LISTED_BYTES = 5 * 10**6


def installed(extras: str, folder: Path) -> tuple[dict[str, int], str]:
    """The bytes that each package takes, by the name of what lies at the top; and which torch it is, if any."""
    source, target = folder / "source", folder / "installed"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if name.partition("/")[0] in ("api", "ir", "kernels", "builder", "loader") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--ignore-installed", "--target", target]
    subprocess.run([*map(str, pip), "-c", str(ROOT / "constraints.txt"), f"{source}{extras}"], check=True)
    if "torch" not in extras:
        for file in target.glob("nvidia/*/lib/*"):
            if file.name.startswith(LEFT_OUT):
                file.unlink()
    compileall.compile_dir(target, quiet=2)
    sizes: Counter[str] = Counter()
    for file in target.rglob("*"):
        if file.is_file() and not file.is_symlink():
            top = file.relative_to(target).parts[0]
            sizes[top.partition("-")[0].partition(".")[0].lower()] += file.stat().st_size
    versions = [found.name.split("-")[1].removesuffix(".dist") for found in target.glob("torch-*.dist-info")]
    return dict(sizes), "".join(versions)


def debian() -> int | None:
    """Bytes of Debian's required packages and of Python's, by dpkg; None where there is none, or some are not here."""
    try:
        asked = ["dpkg-query", "-W", "-f", "${Package} ${Priority} ${Installed-Size}\n"]
        listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = [line.split() for line in listed.splitlines()]
    wanted = {name: int(size) << 10 for name, priority, size in rows if priority == "required" or name in PYTHON}
    return sum(wanted.values()) if wanted.keys() >= set(PYTHON) else None


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", choices=[*IMAGES, []], help=f"of {', '.join(IMAGES)}; default: all")
    names = parser.parse_args().images or list(IMAGES)
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))["figures"] if RESULT.exists() else {}
    system = debian()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            sizes, torch = installed(IMAGES[name], Path(folder))
        whole = None if system is None else system + sum(sizes.values())
        found[name] = {
            "torch": torch, "installed_bytes": sum(sizes.values()), "debian_bytes": system, "image_bytes": whole,
            "largest": {top: size for top, size in Counter(sizes).most_common() if size >= LISTED_BYTES},
        }  # fmt: skip
        print(name, json.dumps(found[name]), flush=True)
    goal = {
        "bytes": GOAL_BYTES,
        "reached": (found.get("without torch", {}).get("image_bytes") or GOAL_BYTES) < GOAL_BYTES,
    }
    machine = {"python": sys.version.split()[0], "system": sys.platform}
    text = json.dumps({"claim": "image", "machine": machine, "figures": found, "goal": goal}, indent=2)
    RESULT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
