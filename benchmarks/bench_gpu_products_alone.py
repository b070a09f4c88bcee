"""On a GPU: what a step of few sequences takes with some of its kernels left out, down to its products alone.

Claim: what norms, gates, attention and the time between kernels could still give is the difference; with these
products, and tokens drawn, a step can't take less. `copies` are products that multiply nothing: what is left is that
the same bytes are copied by as many kernels, each after the one in front; no arithmetic, however fast, goes below that.
Results are wrong, and nobody reads them; of experts only one sequence says something, as all choose the same ones.
Bundles and weights are those of `bench_gpu_served.py`, and beside them bundles without products; each figure is of a
process of its own, by the driver backend, captured. Beside them is how long the bytes of one sequence's step take at
the rate at which the machine sums 8 GB.

    python benchmarks/bench_gpu_products_alone.py --build DIR [SHAPE ...]       # without a GPU: those without products
    python benchmarks/bench_gpu_products_alone.py --bundles DIR [--out FILE] [SHAPE ...]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from bench_gpu_served import READ
from support import harness
from support.no_torch import BLOCK
from support.published_bundles import build, write_checkpoint
from support.served_processes import HERE
from support.served_steps import PROMPT_TOKENS
from support.step_floors import bytes_of_one_token

from precast.ir.artifact import Bundle

SHAPES = ("llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.1-8b-int4", "gpt-oss-20b-mxfp4")
LEFT_OUT = {"all": (), "without gates": ("gate",), "without attention": ("attention", "rotary")}
"""Parts of the names of kernels."""
ALONE = ("stream_linear", "stream_experts", "route")
"""The products, and what chooses experts, on which it depends how many weights are read."""
WITHOUT_PRODUCTS = "without-products"
"""The folder of bundles whose streams only copy."""
STEPS = (
    BLOCK
    + """
import json, os, sys
benchmarks, checkpoint, bundle, digest, left_out, alone, only_copies = sys.argv[1:]
left_out, alone = json.loads(left_out), json.loads(alone)
sys.path.insert(0, benchmarks)
if json.loads(only_copies):
    from support.copies_alone import leave_products_out
    leave_products_out()
import precast
from precast.loader.driver.program import NativeProgram
from support.served_steps import decode_ms
whole = NativeProgram.ready
def part(*arguments):
    ready, outputs = whole(*arguments)
    names = [(each, each.launch.kernel.partition(":")[2]) for each in ready]
    named = lambda name, parts: any(part in name for part in parts)
    return [e for e, name in names if not named(name, left_out) and (not alone or named(name, alone))], outputs
NativeProgram.ready = part
engine = precast.load(
    bundle, weights=checkpoint, device="cuda", cache_bytes=8 << 30, allow_config_mismatch=True, capture="before",
    backend="driver", native=digest, max_num_seqs=8, max_num_tokens=2048,
)
print(json.dumps({str(count): decode_ms(engine, count, rounds=15) for count in (1, 8)}), flush=True)
os._exit(0)
"""
)


def measured(bundle: Path, checkpoint: Path) -> dict[str, Any]:
    """Milliseconds of a step, by what is left of it and by sequences."""
    found: dict[str, Any] = {"step_bytes": bytes_of_one_token(Bundle.open(bundle).graph, PROMPT_TOKENS)}
    parts = {name: (bundle, left_out, ()) for name, left_out in LEFT_OUT.items()}
    parts["products alone"] = bundle, (), ALONE
    copies = bundle.parent / WITHOUT_PRODUCTS / bundle.name
    parts |= {"all, copies": (copies, (), ()), "copies alone": (copies, (), ALONE)}
    try:
        write_checkpoint(bundle, checkpoint)
        for name, (built, left_out, alone) in parts.items():
            digest = Bundle.open(built).digest
            asked = str(checkpoint), str(built), digest, *map(json.dumps, (left_out, alone, built == copies))
            found[name] = harness.fresh_process(STEPS, HERE, *asked)
            print(f"{bundle.stem}, {name}: {json.dumps(found[name])}", flush=True)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bundles", type=Path, default=Path("build/driver"))
    parser.add_argument("--checkpoints", type=Path, default=Path("/dev/shm/precast-checkpoints"))
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "gpu_products_alone.json")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    arguments = parser.parse_args()
    if arguments.build:
        from support.copies_alone import leave_products_out

        leave_products_out()
        folder = arguments.build / WITHOUT_PRODUCTS
        folder.mkdir(parents=True, exist_ok=True)
        for shape in arguments.shapes:
            build(folder, shape)
        return
    machine = harness.machine_by_itself()
    figures: dict[str, Any] = harness.fresh_process(READ, HERE)
    for shape in arguments.shapes:
        figures[shape] = measured(arguments.bundles / f"{shape}.bundle", arguments.checkpoints / shape)
        text = json.dumps({"claim": "gpu_products_alone", "machine": machine, "figures": figures}, indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
