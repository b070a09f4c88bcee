"""From steps to tokens: a step's inputs, and the program that runs on them."""
