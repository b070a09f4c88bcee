"""Products with one of several weights for each row, and the feed-forward layers made of them."""
