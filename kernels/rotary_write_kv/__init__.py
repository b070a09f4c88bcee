"""What is done to queries, keys and values between their product and attention, at once."""
