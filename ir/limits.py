"""How much of anything a bundle or a checkpoint may hold, and expand to, each with its reason.

They keep every command on a hostile bundle to about a second and 200 MB (`benchmarks/bench_hostile.py`); honest
bundles stay a factor of four or more below. A limit is part of the format: it may be raised, and older readers then
refuse what is above theirs; lowering one, once a release has promised it, takes a new major version.

The largest known models have 126 layers, 896 experts in 93 layers, and about 500,000 tensors in a checkpoint.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# --- the container -----------------------------------------------------------------------------------------------

MAX_MARKER_BYTES = KIB
"""`oci-layout`. The file that the OCI specification gives has 30 bytes."""

MAX_INDEX_BYTES = 64 * KIB
"""`index.json`. It lists two manifests, and up to 64 with signatures; tools that copy bundles add annotations."""

MAX_JSON_BYTES = MIB
"""An image manifest, the bundle's manifest, the provenance record. Registries accept manifests of 4 MiB."""

MAX_JSON_NESTING = 32
"""Depth of arrays and objects in JSON. The formats themselves need 5; a provenance record is free in its form."""

MAX_LAYERS = 256
"""Layers of a bundle: one graph, one file of constants, and a tokenizer's files, of which models have up to ten."""

MAX_FILE_NAME_BYTES = 128
"""A tokenizer file's name: below what any file system allows."""

MAX_TOKENIZER_BYTES = 128 * MIB
"""One tokenizer file. The largest vocabularies in use (262,144 tokens) make 33 MB of JSON."""

MAX_HELD_BYTES = 128 * MIB
"""All blobs but native layers together: they are read into memory when a bundle is opened. The largest tokenizers take
40 MB, tables of positions as constants 34 MB. Native layers, at most 512 MiB, are read one at a time."""

MAX_ATTACHED = 64
"""Manifests that are attached to a bundle: its provenance record, signatures, attestations. One of each by each of ten
signers would be 30."""

MAX_ATTACHED_BYTES = 16 * MIB
"""All blobs of attached manifests together, which are read when a bundle is opened. A signature takes 2 kB, a list of
what a builder was made of up to 5 MB."""

# --- the graph ---------------------------------------------------------------------------------------------------

MAX_GRAPH_BYTES = 2 * MIB
"""The graph's blob as it is stored, compressed. The largest known take 20 kB."""

MAX_GRAPH_RAW_BYTES = 8 * MIB
"""The graph's encoding before compression. 126 layers take 0.5 MB; all experts of a layer are one `each`."""

MAX_GRAPH_OBJECTS = 500_000
"""Values of any kind in the graph's encoding: each costs about 60 bytes once decoded, and 2 us in all rules together.
A layer takes 400 to 1,000."""

MAX_NESTING = 64
"""Depth of arrays and maps in the graph's encoding. It leaves 25 levels to recipes and expressions; models use 6."""

MAX_STRING_BYTES = 1024
"""A string in the graph: names of tensors, values, ops. The longest in known checkpoints have 120 bytes."""

MAX_RANK = 16
"""Dimensions of a tensor. torch's own kernels support 25 at most, models use 5."""

MAX_SIZE = 1 << 48
"""Elements along one dimension. Far below the modulus of Python's hashes of integers, past which all shapes could have
one hash, and tables of them be lists."""

MAX_EXPRESSION_TERMS = 32
"""Terms of a normal form: (a + b) * (c + d) has four. Multiplying out can square them; real sizes have up to four."""

MAX_SYMBOLS = 256
"""Symbols: five, and two for each group of the cache plan."""

MAX_PARAMS = 1 << 14
"""Params. Layers have 9 to 30."""

MAX_STEPS = 1 << 14
"""Nodes and calls as they are written. A layer has about 40 nodes, most models two or three kinds of layers; where no
layer is like another, 126 take 5,000."""

MAX_RUN_NODES = 1 << 15
"""Nodes over all calls, which memory is planned for one by one. Most models run up to 2,500; DeepSeek-V4-Pro, whose
61 layers have 340 each, with the steps of fused ops, 20,912."""

MAX_RUN_ARGUMENTS = 1 << 17
"""Arguments of nodes and calls, over all calls. Nodes have six, calls 25: the largest known model has 11,400."""

MAX_FUSED_STEPS = 64
"""Steps of a fused op. The builder fuses up to as many; the longest in known models has 30. Each is checked as a node
is, and counts as one."""

MAX_FUSED_RESULTS = 4
"""Results of a fused op: what a kernel writes in one go. Known models have up to three."""

MAX_EXPRESSION_NODES = 128
"""Symbols, numbers and operations in one expression. Real ones have up to 20."""

MAX_EXPRESSIONS = 1 << 12
"""Symbols, numbers and operations in all different expressions of a graph, but for plain symbols. Models have some
hundreds."""

MAX_PREFIXES = 64
"""Prefixes of tensor names in the manifest's rules of a checkpoint: each name is tried with each. Models have two."""

MAX_PATTERNS = 1 << 12
"""Patterns of tensors that are passed over, in the manifest. Models have ten, or some for each layer."""

MAX_MATCHES = 1 << 23
"""Comparisons of a checkpoint's tensors with these patterns. 5,000 tensors of experts that only training uses, and 500
patterns, are 2,500,000."""

MAX_TIED = 1 << 10
"""Names of tensors in the manifest that are tied to others."""

MAX_EACH = 1 << 13
"""Parts of one `each`, and matrices of one `dequantise`: experts of a layer, of which the largest models have 896."""

MAX_READS = 1 << 20
"""Tensors that all recipes read, those of an `each` for each number. 896 experts in 93 layers, of three matrices with
their scales, are 500,000."""

MAX_WORLDS = 256
"""Numbers of ranks that a graph can be split over, each with numbers of parts of the experts; all sizes are computed
for each. Models with many experts have some 30 up to 64 ranks."""

MAX_STAGES = 64
"""Into which a plan divides the layers."""

MAX_OVERRIDES = 1 << 10
"""Entries of a user's shard plan."""

MAX_REPEATED_READS = 1 << 15
"""Reads of tensors that were read before: they cost a load 20 us each, and a checkpoint nothing. Each tensor of a known
model is read once; ten reads of one tensor in each of 126 layers would be 1,260."""

MAX_HELD = 1 << 16
"""Different sizes of values that are alive, summed over all nodes that run. Four are at a time: 10,000 in all."""

MAX_COMPARISONS = 1 << 18
"""Comparisons of sums of bytes, of which one is a run's peak. 126 layers have 500 different sums, six of them large."""

MAX_VALUE_BYTES = 256 * MIB
"""A value of a step with one token, unless a tensor that the graph is given has a quarter of its bytes: a table may be
widened whole. Logits of 262,144 tokens in float32 take 1 MiB."""

# --- native layers -----------------------------------------------------------------------------------------------

MAX_NATIVE_LAYERS = 16
"""Native layers of a bundle, one a target. There are nine targets."""

MAX_NATIVE_BYTES = 32 * MIB
"""A native layer as it is stored, compressed. Those of known models take 1 to 3 MB."""

MAX_NATIVE_RAW_BYTES = 64 * MIB
"""Its encoding before compression: kernels of one model resemble one another, and shrink to a sixth."""

MAX_NATIVE_OBJECTS = 1 << 18
"""Values of any kind in its encoding. A kernel has about 100."""

MAX_KERNELS = 1 << 11
"""Kernels of a layer. Known models have up to 200."""

MAX_KERNEL_PARAMS = 512
"""Parameters of a kernel, and arguments of its launch: CUDA passes 4 kB on all GPUs, 8 bytes each."""

MAX_IMAGE_BYTES = 4 * MIB
"""The image of one kernel. The largest has 150 kB."""

# --- the cache plan ----------------------------------------------------------------------------------------------

MAX_GROUPS = 64
"""Groups of a cache plan, each with a page table in every step. Models have up to six."""

MAX_PAGE_TOKENS = 1 << 12
"""Tokens of a page. The builder's option takes up to 1024."""

MAX_PAGE_BYTES = 64 * GIB
"""A page of a group in all its layers. 1024 tokens of 126 layers with 128 heads of 128 would take 8 GiB; models have
few heads of keys and values, and states of up to 1 GiB. Slabs are searched for from the largest page on."""

# --- the capture plan --------------------------------------------------------------------------------------------

MAX_CAPTURED_SIZES = 128
"""Sizes of captured steps: each costs a loader time and memory. The builder plans 20, for 256 tokens, to 28."""

MAX_CAPTURED_TOKENS = 1 << 14
"""Tokens of a captured step, whose activations are held for as long as the graphs are. The builder plans up to 1,024:
past them a GPU's work takes longer than its launches."""

# --- tensors -----------------------------------------------------------------------------------------------------

MAX_CONSTANTS_BYTES = 64 * MIB
"""The constants' blob. Constants are small tables; what is larger belongs in the checkpoint."""

MAX_TENSOR_HEADER_BYTES = 32 * MIB
"""The header of a safetensors file. A tensor takes 120 bytes, a shard of 5 GB has up to 10,000."""

MAX_FILE_TENSORS = 1 << 17
"""Tensors of one safetensors file. All of a model with 384 experts in 61 layers are 70,000."""

MAX_CHECKPOINT_TENSORS = 1 << 20
"""Tensors of all files of a checkpoint."""

MAX_CHECKPOINT_FILES = 1 << 12
"""Safetensors files of a checkpoint. Those of 1 TB have up to 250."""

MAX_CHECKPOINT_INDEX_BYTES = 100_000_000
"""`model.safetensors.index.json`. 500,000 tensors take 50 MB."""

MAX_CONFIG_BYTES = 4 * MIB
"""A checkpoint's `config.json`. The largest known have some 100 kB, of labels and quantised modules."""

MAX_CONFIG_ENTRIES = 1 << 17
"""Entries of a checkpoint's config, by all of their names. Models have up to 1,000."""

# --- trust -------------------------------------------------------------------------------------------------------

MAX_STATEMENT_BYTES = MIB
"""A sigstore bundle with the statement in it. A signature takes 700 bytes, an SBOM of a hundred sources 40 kB."""

MAX_SUBJECTS = 1024
"""Subjects of one statement. A signature has one."""

MAX_CERTIFICATES = 8
"""Certificates of a chain. Authorities have one or two between their root and who signs."""

MAX_TRUST_BYTES = MIB
"""A trust.json, a file of keys or certificates, a precast.lock. A rule takes some hundred bytes."""

MAX_RULES = 1 << 10
"""Rules of a trust.json."""

# --- waits ---------------------------------------------------------------------------------------------------------

MAX_SECONDS = 1_000_000
"""That anything may be told to wait: eleven days. Systems count waits in 32 bits of milliseconds, and refuse more."""

# --- messages ----------------------------------------------------------------------------------------------------

MAX_LISTED = 20
"""Problems of one kind that a message lists; the rest is counted."""

MAX_PROBLEMS = 10_000
"""Problems of a checkpoint that are looked for; past them nobody counts."""

MAX_SHOWN = 400
"""Characters of a name, or of a line that holds names, in a message or table: module names have up to 120."""

MAX_MESSAGE = 1 << 16
"""Characters of a message."""
