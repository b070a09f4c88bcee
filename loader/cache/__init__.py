"""The cache memory: an arena, pools of pages, page tables, and prefixes that are reused."""
