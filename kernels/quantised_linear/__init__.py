"""Linear layers whose weights are in few bits on the device, as they were published."""
