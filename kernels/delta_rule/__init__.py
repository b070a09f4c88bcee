"""The delta rule: linear attention that first reads what a key holds, and writes the difference."""
