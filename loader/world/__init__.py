"""The ranks that run one model together: how they find one another, agree, follow rank 0, and end."""
