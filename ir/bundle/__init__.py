"""The container: an OCI image layout on disk, its encodings and versions. It knows nothing of graphs."""
