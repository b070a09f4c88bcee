"""From recipes to params on the device: byte ranges, read once, streamed into place."""
