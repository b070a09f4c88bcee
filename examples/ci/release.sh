#!/bin/sh
# From two builds of one bundle to a release: compared, pushed by digest, signed, attested, read back, verified, tagged.
#
#   release.sh FIRST SECOND REPOSITORY:TAG
#
# FIRST and SECOND are bundles that two machines built of the same source. In the environment:
#   RELEASE_KEY, RELEASE_PUB    the key pair that signs
#   BUILDER_KEY, BUILDER_PUB    another one, which attests: docs/trust.md says why
#   BUILDER_ID, RUN_ID          what built: a URI of the workflow, and of its run
#   PRECAST_PASSPHRASE          of the private keys, if they are encrypted
# The tag is written last, and only if everything before it was good: who pulls by tag never sees half a release.
set -eu
first=$1 second=$2 reference=$3
repository=${reference%:*}

say() { printf '== %s\n' "$*"; }

say "both builds have the same digest"
digest=$(precast digest "$first")
again=$(precast digest "$second")
if [ "$digest" != "$again" ]; then
    precast diff "$first" "$second" || true
    echo "the builds differ: $digest and $again" >&2
    exit 1
fi

say "pushed by digest, without a tag"
precast push "$first" "$repository@$digest"

say "signed and attested in the registry"
address=oci://$repository@$digest
precast sign "$address" --key "$RELEASE_KEY" --name "$repository"
precast attest "$address" --key "$BUILDER_KEY" --name "$repository" --builder-id "$BUILDER_ID" --run-id "$RUN_ID"

say "read back into an empty store, and verified"
back=$(mktemp -d)
trap 'rm -rf "$back"' EXIT
PRECAST_STORE=$back/store precast pull "$repository@$digest" -o "$back/bundle"
precast verify "$back/bundle" --key "$RELEASE_PUB"
precast verify "$back/bundle" --key "$BUILDER_PUB" --attestation provenance --attestation sbom

say "tagged"
precast push "$back/bundle" "$reference"
