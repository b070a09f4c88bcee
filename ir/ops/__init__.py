"""The op table: what each op takes, what it gives, what it writes, and what it costs."""
