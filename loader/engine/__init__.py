"""What a user of a loaded model meets: prompts, answers, events, counters."""
