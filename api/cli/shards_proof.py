"""What `precast verify --shards` says."""

from __future__ import annotations

from precast.cli.progress import stages
from precast.cli.show import Report
from precast.ir.artifact import Bundle


def proof_of(bundle: Bundle, tp: int, ep: int, pp: int, dp: int) -> Report:
    """Whether so many ranks give the logits of one; raises what `prove_with_random_weights` raises."""
    with stages(("ranks",), "comparing"):
        from precast.check.shards import TOLERANCE, prove_with_random_weights

        proof, layers, all_layers = prove_with_random_weights(bundle, tp=tp, ep=ep, pp=pp, dp=dp)
    share = max(proof.rank_bytes) / proof.model_bytes
    fields = {
        "tp": tp, "ep": ep, "pp": pp, "dp": dp, "holds": proof.holds, "error": proof.error, "layers": layers,
        "all_layers": all_layers, "rank_bytes": list(proof.rank_bytes), "model_bytes": proof.model_bytes,
    }  # fmt: skip
    each = "one" if pp == 1 else f"up to {pp}"
    kept = "all layers" if layers == all_layers else f"{layers} of {all_layers} layers, {each} of each kind"
    verdict = "give" if proof.holds else "DON'T give"
    text = (
        f"shards: {proof.text} {verdict} the logits of one within {TOLERANCE:.0e}: they differ by {proof.error:.1e} "
        f"(relative; {kept}, random weights, float32); a rank reads at most {100 * share:.1f} % of the bytes"
    )
    return Report({"shards": fields}, text)
