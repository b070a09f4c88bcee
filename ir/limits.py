"""How much of anything a bundle may hold, each with its reason.

They keep a hostile bundle from taking memory or time out of proportion to its size; honest bundles stay a factor of
four or more below. A limit is part of the format: it may be raised, and older readers then refuse what is above
theirs; lowering one takes a new major version.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# --- the container -----------------------------------------------------------------------------------------------

MAX_MARKER_BYTES = KIB
"""`oci-layout`. The file that the OCI specification gives has 30 bytes."""

MAX_INDEX_BYTES = 64 * KIB
"""`index.json`. It lists two manifests; tools that copy bundles add annotations."""

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

MAX_BUNDLE_BYTES = GIB
"""All blobs together: they are read into memory when a bundle is opened."""

# --- the graph ---------------------------------------------------------------------------------------------------

MAX_GRAPH_BYTES = 16 * MIB
"""The graph's blob as it is stored, compressed."""

MAX_GRAPH_RAW_BYTES = 64 * MIB
"""The graph's encoding before compression. 126 layers take 0.5 MB; 94,000 experts' recipes take 10 MB."""

MAX_GRAPH_OBJECTS = 4_000_000
"""Values of any kind in the graph's encoding: what it costs in memory once decoded, about 60 bytes each."""

MAX_NESTING = 64
"""Depth of arrays and maps in the graph's encoding. It leaves 25 levels to recipes and expressions; models use 6."""

MAX_STRING_BYTES = 1024
"""A string in the graph: names of tensors, values, ops. The longest in known checkpoints have 120 bytes."""

MAX_RANK = 16
"""Dimensions of a tensor. torch's own kernels support 25 at most, models use 5."""

MAX_EXPRESSION_TERMS = 32
"""Terms of a normal form: (a + b) * (c + d) has four. Multiplying out can square them; real sizes have up to four."""

MAX_EACH = 1 << 16
"""Parts of one `each`: experts of a layer, of which the largest models have 1024."""

MAX_VALUE_BYTES = 256 * MIB
"""A value of a step with one token, unless a tensor that the graph is given has a quarter of its bytes: a table may be
widened whole. Logits of 262,144 tokens in float32 take 1 MiB."""

# --- the cache plan ----------------------------------------------------------------------------------------------

MAX_GROUPS = 64
"""Groups of a cache plan, each with a page table in every step. Models have up to six."""

MAX_PAGE_TOKENS = 1 << 12
"""Tokens of a page. The builder's option takes up to 1024."""

MAX_PAGE_BYTES = 64 * GIB
"""A page of a group in all its layers. 1024 tokens of 126 layers with 128 heads of 128 would take 8 GiB; models have
few heads of keys and values, and states of up to 1 GiB. Slabs are searched for from the largest page on."""

# --- tensors -----------------------------------------------------------------------------------------------------

MAX_CONSTANTS_BYTES = 64 * MIB
"""The constants' blob. Constants are small tables; what is larger belongs in the checkpoint."""

MAX_TENSOR_HEADER_BYTES = 100_000_000
"""The header of a safetensors file: the limit of the safetensors library itself."""

MAX_CHECKPOINT_INDEX_BYTES = 100_000_000
"""`model.safetensors.index.json`. 94,000 tensors take 10 MB."""

MAX_CONFIG_BYTES = 16 * MIB
"""A checkpoint's `config.json`. The largest known have some 100 kB, of labels."""

# --- messages ----------------------------------------------------------------------------------------------------

MAX_LISTED = 20
"""Problems of one kind that a message lists; the rest is counted."""
