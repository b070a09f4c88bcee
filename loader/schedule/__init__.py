"""From requests to steps."""
